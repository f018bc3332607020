"""Draft and target as two engine models, behind two instances of the front door."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from tests.support.draft_servers import draft_server
from tests.support.stubs import stub_pids

from enginehouse_backends.accounting import setup, views
from enginehouse_builders.cpu.build import BuildOptions, build_engine
from enginehouse_builders.demo_model import fetch_demo_model
from enginehouse_client import Client, GenerationResult
from enginehouse_contract.errors import InvalidRequestError, UnsupportedFeatureError
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers import RunningServer

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.slow]

PROMPTS = [
    "The capital of France is",
    "Repeat after me: the quick brown fox jumps over the lazy dog. The quick brown fox",
    "Water boils at",
    "def add(a, b):",
]
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The model in float KV as target, its int4 form as draft: alike, and not the same."""
    settings = load_settings()
    model = fetch_demo_model(settings.cache_dir)
    target = build_engine(BuildOptions(model=model, kv_precision="f32"), settings.store_dir).build_dir
    draft = build_engine(BuildOptions(model=model, weight_precision="int4"), settings.store_dir).build_dir
    with draft_server(target, draft, tmp_path_factory.mktemp("draft"), num_front_doors=2) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    """A client over gRPC."""
    with Client(server.grpc_url) as opened:
        yield opened


def drafts_of(result: GenerationResult) -> tuple[int, int]:
    """Return how many drafts were verified and accepted."""
    usage = result.usage
    assert usage.num_draft_tokens is not None
    assert usage.num_accepted_draft_tokens is not None
    return usage.num_draft_tokens, usage.num_accepted_draft_tokens


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("way", [{"speculate": "draft"}, {"num_draft_tokens": 3}, {"num_draft_tokens": 8}])
def test_greedy_text_is_the_targets_own(client: Client, prompt: str, way: dict[str, object]) -> None:
    """With drafts asked for by either input, of any length, streamed: the same text, and drafts were accepted."""
    plain = client.generate(prompt, max_tokens=NUM_TOKENS, speculate="off")
    chunks = []
    asked = {key: value for key, value in way.items() if key != "num_draft_tokens"}
    extra = {key: value for key, value in way.items() if key == "num_draft_tokens"}
    for chunk in client.generate_stream(prompt, max_tokens=NUM_TOKENS, extra_inputs=extra, **asked):
        chunks.append(chunk)  # noqa: PERF402 - the stream must be a stream
    drafted = client.generate(prompt, max_tokens=NUM_TOKENS, extra_inputs=extra, **asked)
    num_drafts, num_accepted = drafts_of(drafted)

    assert drafted.text == plain.text == "".join(chunk.text for chunk in chunks)
    assert drafted.usage.num_output_tokens == plain.usage.num_output_tokens
    assert drafted.finish_reason == plain.finish_reason
    assert 0 < num_accepted <= num_drafts
    assert len(chunks) > 2


def test_lookup_from_the_front_door_needs_no_draft_model(client: Client) -> None:
    """`speculate` ngram with `num_draft_tokens` drafts from the prompt itself."""
    plain = client.generate(PROMPTS[1], max_tokens=NUM_TOKENS, speculate="off")
    drafted = client.generate(
        PROMPTS[1], max_tokens=NUM_TOKENS, speculate="ngram", extra_inputs={"num_draft_tokens": 4}
    )

    assert drafted.text == plain.text
    assert drafts_of(drafted)[1] > 0


def test_no_round_computes_the_context_again(server: RunningServer, client: Client) -> None:
    """Every round takes its context from the cache, up to the last token; the ledger would show the rest."""
    prompt = " ".join(str(number) for number in range(80))
    answer = client.generate(prompt, max_tokens=NUM_TOKENS, speculate="draft", request_id="rounds")
    with setup.open_ledger(server.settings) as ledger:
        record = next(r for r in views.records(ledger.database) if r.key.request_id == "rounds")

    assert answer.usage.num_input_tokens is not None
    assert answer.usage.num_input_tokens > 150
    assert record.usage.num_output_tokens == NUM_TOKENS
    assert record.usage.num_recomputed_tokens < NUM_TOKENS
    assert record.usage.num_draft_rejected_tokens == drafts_of(answer)[0] - drafts_of(answer)[1]


def test_draft_logits_and_seeds_sample_reproducibly(client: Client) -> None:
    """With `use_draft_logits` distributions are compared; the same seed gives the same text."""
    options = {"max_tokens": 24, "top_k": 40, "temperature": 0.9, "seed": 11, "speculate": "draft"}
    first = client.generate(PROMPTS[0], extra_inputs={"use_draft_logits": True}, **options)
    second = client.generate(PROMPTS[0], extra_inputs={"use_draft_logits": True}, **options)

    assert first.text == second.text
    assert drafts_of(first)[0] > 0


def test_many_drafted_streams_at_once_over_two_front_doors(server: RunningServer, client: Client) -> None:
    """Both instances answer, whoever gets a request, and each text is the one that is made alone."""
    alone = {prompt: client.generate(prompt, max_tokens=24, speculate="off").text for prompt in PROMPTS}
    wrong: list[str] = []

    def ask(prompt: str) -> None:
        with Client(server.grpc_url) as own:
            if own.generate(prompt, max_tokens=24, speculate="draft").text != alone[prompt]:
                wrong.append(prompt)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert len(stub_pids(server, "tensorrt_llm_bls")) == 2


def test_several_sequences_of_a_drafted_row_are_refused(client: Client) -> None:
    """It names the input; a mode that does not exist likewise."""
    with pytest.raises(UnsupportedFeatureError, match="num_return_sequences"):
        client.generate("x", max_tokens=4, n=2, speculate="draft")
    with pytest.raises(InvalidRequestError, match="speculate"):
        client.generate("x", max_tokens=4, extra_inputs={"speculate": "medusa"})
