"""What gates need of a server: engines under names that no client knows, on a private server or on a running one."""

from __future__ import annotations

import secrets
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import numpy as np
from google.protobuf import json_format, text_format  # type: ignore[import-untyped] # tritonclient brings it
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from enginehouse_backends.server.repository import render_repository
from enginehouse_backends.server.supervisor import ServerOptions, TritonServer
from enginehouse_backends.tokenization.chat import render_chat
from enginehouse_backends.tokenization.tokenizer import load_tokenizer
from enginehouse_client._errors import FOREIGN_ERRORS, error_of_message, map_exception
from enginehouse_contract.errors import BuildError, ConfigurationError, EngineFailureError, refusal
from enginehouse_contract.model_config import MODEL_VERSION, make_config
from enginehouse_contract.settings import Settings
from enginehouse_contract.tensors import TENSORRT_LLM

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from enginehouse_backends.tokenization.tokenizer import Tokenizer
    from enginehouse_builders.gates.services import EngineService
    from enginehouse_builders.store import StoredBuild

_OPTIONS: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_TIMEOUT_S: Final = 300.0
_LOAD_TIMEOUT_S: Final = 600.0
_NOT_EXPLICIT: Final = "explicit model load / unload is not allowed"  # Triton's own words
_DTYPES: Final = {"INT32": np.int32, "FP32": np.float32}


class BuildEncoder:
    """A build's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a plain prompt."""
        return self._tokenizer.encode(text, name="prompt")

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """Return the token ids of chat messages, or None where the build has no template."""
        if self._tokenizer.chat_template is None:
            return None
        return self._tokenizer.encode(render_chat(self._tokenizer, list(messages)), add_special_tokens=False)


class GrpcEngine:
    """One engine model of a server, asked in token ids; thread-safe."""

    def __init__(self, target: str, model: str) -> None:
        self._target, self._model = target, model
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self.served_build_id = self._read_build_id()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def stream(self, token_ids: Sequence[int], num_tokens: int) -> Iterator[list[int]]:
        """Generate greedily and yield new ids as they come; without an end id, so that it never ends early."""
        for outputs in self._ask(token_ids, num_tokens, streaming=True):
            new: list[int] = outputs["output_ids"].reshape(-1).tolist()
            if new:
                yield new

    def context_logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after each token, [tokens, vocab].

        Raises :class:`EngineFailureError` for an engine that does not answer them.
        """
        answers = list(self._ask(token_ids, 1, return_context_logits=True, exclude_input_in_output=True))
        for outputs in answers:
            logits = outputs.get("context_logits")
            if logits is not None and logits.size:
                return logits.reshape(logits.shape[-2:]).astype(np.float32, copy=False)
        raise EngineFailureError("the engine answered no context logits")

    def _ask(self, token_ids: Sequence[int], num_tokens: int, **flags: bool) -> Iterator[dict[str, NDArray[Any]]]:
        numbers = {"input_lengths": len(token_ids), "request_output_len": num_tokens, "runtime_top_k": 1}
        message = service_pb2.ModelInferRequest(model_name=self._model, id=f"gate-{secrets.token_hex(8)}")
        arrays: dict[str, NDArray[Any]] = {"input_ids": np.array([token_ids], np.int32)}
        arrays |= {name: np.array([[value]], np.int32) for name, value in numbers.items()}
        arrays |= {name: np.array([[value]], np.bool_) for name, value in flags.items()}
        for name, array in arrays.items():
            kind = "BOOL" if array.dtype == np.bool_ else "INT32"
            message.inputs.add(name=name, datatype=kind, shape=array.shape)
            message.raw_input_contents.append(array.tobytes())
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        call = self._stub.ModelStreamInfer(iter((message,)), timeout=_TIMEOUT_S)
        try:
            for response in call:
                inner = response.infer_response
                is_final = bool(inner.parameters["triton_final_response"].bool_param)
                if response.error_message or is_final:
                    for _ in call:  # cancelled while it ends, a call would keep the model from being unloaded
                        pass
                if response.error_message:
                    raise error_of_message(response.error_message)
                if inner.outputs:
                    yield _decode(inner)
                if is_final:
                    return
        except FOREIGN_ERRORS as error:
            raise map_exception(error, self._target) from error
        finally:
            call.cancel()  # a finished call ignores it
        raise EngineFailureError("the engine's stream ended before its answer")

    def _read_build_id(self) -> str:
        try:
            answer = self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=self._model), timeout=_TIMEOUT_S)
        except FOREIGN_ERRORS as error:
            raise map_exception(error, self._target) from error
        return str(answer.config.parameters["build_digest"].string_value)


def _decode(response: Any) -> dict[str, NDArray[Any]]:
    return {
        tensor.name: np.frombuffer(raw, _DTYPES[tensor.datatype]).reshape(tuple(tensor.shape))
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        if tensor.datatype in _DTYPES
    }


class _Encoders:
    """The part of :class:`GateTools` that is the same wherever builds are served."""

    def encoder(self, build: StoredBuild) -> BuildEncoder:
        """Load a build's tokenizer."""
        return BuildEncoder(load_tokenizer(build.build_dir))


class PrivateServers(_Encoders):
    """Serves each build on a tritonserver of its own, in a state folder that is removed afterwards."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @contextmanager
    def serve(self, build: StoredBuild) -> Iterator[EngineService]:
        """Start a server with the build's engine alone and stop it at the end; its log is kept with the others.

        Raises :class:`ServerStartError` in the server's words.
        """
        try:
            folder = tempfile.TemporaryDirectory(prefix="enginehouse-gate-", dir=self._scratch_dir())
        except OSError as error:
            raise BuildError(f"{self._settings.cache_dir} cannot be written ({error.strerror or error}).") from error
        with folder as home:
            settings = Settings(home=Path(home), accounting="off")
            render_repository(settings.repository_dir, build.build_dir)
            options = ServerOptions(
                settings.repository_dir, build_id=build.manifest.build_id, models=(TENSORRT_LLM.name,)
            )
            with TritonServer(settings, options) as server:
                assert server.state is not None, "it has started"
                engine = GrpcEngine(server.state.grpc_url, TENSORRT_LLM.name)
                try:
                    yield engine
                finally:
                    engine.close()

    def _scratch_dir(self) -> Path:
        self._settings.cache_dir.mkdir(parents=True, exist_ok=True)
        return self._settings.cache_dir


class ShadowModels(_Encoders):
    """Serves builds on a running server in explicit mode, under new names that nothing else refers to.

    The model's config goes with the load request; the server's repository is neither read nor changed. The server must
    see the build's folder under the same path.
    """

    def __init__(self, target: str) -> None:
        self._target = target

    @contextmanager
    def serve(self, build: StoredBuild) -> Iterator[EngineService]:
        """Load the build's engine and unload it at the end; raise an error of our tree in the server's words."""
        model = f"gate-{build.manifest.build_id.removeprefix('sha256:')[:12]}-{secrets.token_hex(4)}"
        with grpc.insecure_channel(self._target, options=_OPTIONS) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            self._load(stub, model, build)
            try:
                engine = GrpcEngine(self._target, model)
                try:
                    yield engine
                finally:
                    engine.close()
            finally:
                self._unload(stub, model)

    def _load(self, stub: Any, model: str, build: StoredBuild) -> None:
        parameters = {"gpt_model_path": str(build.build_dir), "build_digest": build.manifest.build_id}
        config = text_format.Parse(
            replace(make_config(TENSORRT_LLM.name, parameters), name=model).render(), model_config_pb2.ModelConfig()
        )
        message = service_pb2.RepositoryModelLoadRequest(model_name=model)
        message.parameters["config"].string_param = json_format.MessageToJson(config, preserving_proto_field_name=True)
        # A config may come with a request only together with the model's files; a backend's model needs none.
        message.parameters[f"file:{MODEL_VERSION}/.gitkeep"].bytes_param = b""
        try:
            stub.RepositoryModelLoad(message, timeout=_LOAD_TIMEOUT_S)
        except FOREIGN_ERRORS as error:
            if _NOT_EXPLICIT in str(error):
                hint = "Start it with --model-control-mode=explicit."
                raise ConfigurationError(refusal("--url", "must name a server in explicit mode", hint=hint)) from error
            raise map_exception(error, self._target) from error

    def _unload(self, stub: Any, model: str) -> None:
        try:
            message = service_pb2.RepositoryModelUnloadRequest(model_name=model)
            stub.RepositoryModelUnload(message, timeout=_LOAD_TIMEOUT_S)
        except FOREIGN_ERRORS as error:
            raise map_exception(error, self._target) from error
