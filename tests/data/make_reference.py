"""Make `reference_greedy.json`: what transformers generates greedily from the demo model, in float32.

Run by hand, in an environment with torch, transformers, accelerate and gguf: ``python make_reference.py MODEL.gguf``.
The weights are the GGUF's, dequantized by transformers; end tokens do not end a continuation.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
import transformers

NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
    "import numpy as np\n\ndef softmax(x):\n    ",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "The quick brown fox jumps over the lazy dog. The quick brown",
    "Q: What is 12 times 12?\nA:",
    "1, 2, 3, 5, 8, 13,",
    "La capitale de l'Allemagne est",
    "Der schnelle braune Fuchs springt",
    "\u5317\u4eac\u662f\u4e2d\u56fd\u7684",
    "I love pizza \U0001f355 and",
    "Water boils at",
    "- apples\n- oranges\n-",
    "SELECT name, age FROM users WHERE",
    "<html>\n<head>\n  <title>",
    "The mitochondria is",
    "In 1969, Neil Armstrong",
    "Dear Sir or Madam,\n\nI am writing to",
    "a",
    "Photosynthesis is the process by which plants convert light into energy. " * 40 + "In short,",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nList three primary colors.<|im_end|>\n<|im_start|>assistant\n",
]


def main(path: Path) -> None:
    """Write the reference beside this script."""
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    config = model.config
    print(type(model).__name__, config.rms_norm_eps, config.rope_parameters, config.tie_word_embeddings)  # noqa: T201
    records = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        records.append({"prompt": prompt, "prompt_ids": ids, **continue_greedily(model, ids)})
    reference = {
        "model": path.name,
        "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "num_tokens": NUM_TOKENS,
        "records": records,
    }
    text = json.dumps(reference, separators=(",", ":"))
    Path(__file__).with_name("reference_greedy.json").write_text(text + "\n", encoding="utf-8")


@torch.inference_mode()
def continue_greedily(model: transformers.PreTrainedModel, ids: list[int]) -> dict[str, list[float]]:
    """Return token ids, the gap between the two largest logits, and log probabilities, step by step."""
    tokens, gaps, log_probs = [], [], []
    cache = None
    step = torch.tensor([ids])
    for _ in range(NUM_TOKENS):
        out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits = out.logits[0, -1]
        top = torch.topk(logits, 2)
        token = int(top.indices[0])
        tokens.append(token)
        gaps.append(round(float(top.values[0] - top.values[1]), 5))
        log_probs.append(round(float(top.values[0] - torch.logsumexp(logits, 0)), 5))
        step = torch.tensor([[token]])
    return {"token_ids": tokens, "gaps": gaps, "log_probs": log_probs}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
