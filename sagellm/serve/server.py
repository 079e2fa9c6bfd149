"""Brings the server up, tells when it is ready, and takes it down without leaving anything behind."""

import asyncio
import inspect
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TextIO

import psutil
import uvicorn
from uvicorn.config import LOGGING_CONFIG

from sagellm.core.config import PDHooks, SageConfig
from sagellm.core.early import STOP_SIGNALS, skip_teardown
from sagellm.core.errors import ConfigError, PeerError, PluginError
from sagellm.core.ports import listen
from sagellm.core.registry import check_owners, find_plugin
from sagellm.core.run_folder import hold, remove_abandoned
from sagellm.engines.lmdeploy.architecture import sees
from sagellm.engines.lmdeploy.device_settings import executor_of
from sagellm.engines.lmdeploy.engine import prepare_weights
from sagellm.engines.lmdeploy.libraries import load_lmdeploy
from sagellm.engines.lmdeploy.settings_plugins import all_plugins
from sagellm.engines.lmdeploy.sizing import Sizes, size_engine
from sagellm.engines.lmdeploy.speculative.methods import speculative_config
from sagellm.engines.lmdeploy.worker_processes import expecting_workers
from sagellm.kv_policy.registry import policy_names
from sagellm.models import find_model, prepare_model
from sagellm.serve.backends import Backend, backend_of
from sagellm.serve.following import EngineProcess, loading_libraries
from sagellm.serve.lifecycle import EngineWatch, Loading, end_children, end_tracker
from sagellm.serve.logprobs import chat_logprobs
from sagellm.serve.logs import claim_stdout, quiet_disconnects
from sagellm.serve.speculation import with_guesses

if TYPE_CHECKING:
    from sagellm.accel.sot.group import Master
    from sagellm.serve.generation import GuardedGeneration
    from sagellm.serve.group import Membership
    from sagellm.serve.registration import Registration

RUN_PREFIX = "sagellm-"
ENDING = "the server is shutting down"
LAST_WORDS_S = 2.0  # for error events on their way to clients
MAX_SOCKET_NAME = 107  # bytes that the kernel takes for the path of a local socket


def run(config: SageConfig, as_json: bool = False) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code, 0 after an orderly end.

    Raises:
        SageError: before anything was started: unpatched LMDeploy, port in use, too much memory asked for, bad plug-in.
    """
    source = find_model(config.model)
    # An engine process of a group tells others its name.
    config = config.model_copy(update={"model_name": config.model_name or source.name})
    backend = backend_of(config)
    device = backend.require()
    if config.sot_workers:
        from sagellm.serve.sot_workers import for_each_engine

        config = for_each_engine(config, device)
    check_plugins(config)
    run_dir = _run_dir(config)
    listener = listen(config.host, config.port)
    clean_up = partial(shutil.rmtree, run_dir, ignore_errors=True)
    try:
        member = _membership(config, device)
    except BaseException:
        listener.close()
        raise
    loading = Loading(clean_up)
    try:
        run_dir.mkdir(0o700)  # not before there is somebody to take it away again
        hold(run_dir)
        remove_abandoned(f"{RUN_PREFIX}????????")
        num_threads = _num_threads()
        with loading_libraries():
            load_lmdeploy()
        model = prepare_weights(config, prepare_model(source))
        sizes = size_engine(config, model, device)
        engine_config = backend.engine_config(model, sizes, device, run_dir, _hooks(config, member, run_dir))
        banner = _Banner(config, device, sizes, as_json, claim_stdout())
        # Not an engine on a GPU: to look for one may initialize CUDA, which does not work in forks. Not either where the
        # preparation of weights has started threads of OpenMP, which a fork would wait for.
        can_fork = device == "cpu" and _num_threads() == num_threads
        watch = EngineWatch(clean_up, run_dir, partial(_start_again, banner) if config.restart_workers else None)
        has_forks = device == "cpu" and executor_of(config, device) == "mp"
        with expecting_workers(has_forks, run_dir):
            code = Launch(
                config, backend, model, source.sampling(model), engine_config, can_fork, listener, banner, loading, watch,
                run_dir, member,
            ).serve()  # fmt: skip
    finally:
        loading.wait_for_stop()
        if member is not None:
            member.close()
        backend.close()
        listener.close()
        clean_up()
        loading.cancel()
    if watch.engine_died and config.restart_workers:
        _start_again(banner)
    return code


def _start_again(banner: "_Banner") -> NoReturn:
    """Run the same command in this process. Nothing of it may be left."""
    print("the server starts again", file=sys.stderr, flush=True)
    banner.give_back()
    end_tracker()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a thread may call this
    os.execv(sys.executable, sys.orig_argv)


def _run_dir(config: SageConfig) -> Path:
    """A folder that is not there yet.

    Raises:
        ConfigError: the temporary directory is so deep that the sockets of workers in it could have no name.
    """
    run_dir = Path(tempfile.gettempdir(), f"{RUN_PREFIX}{secrets.token_hex(4)}")
    if config.tensor_parallel == 1:
        return run_dir
    names = "listener-12345678"  # as `multiprocessing` names it: of the process that workers are forked from
    if config.sot_workers:
        names = f"w{config.sot_workers}/pymp-12345678/{names}"  # of workers of skeleton-of-thought
    longest = len(os.fsencode(run_dir / names))
    if longest > MAX_SOCKET_NAME:
        raise ConfigError(
            f"the temporary directory {run_dir.parent} is too deep: the path of a socket in it has {longest} bytes, allowed "
            f"are {MAX_SOCKET_NAME}. Set TMPDIR to a shorter one."
        )
    return run_dir


def _num_threads() -> int:
    """Return the number of threads of this process, those of libraries included."""
    return psutil.Process().num_threads()


def _load_engine() -> None:
    """Load what the engine's process needs, and this one too."""
    with loading_libraries():
        import lmdeploy.pytorch.engine.mp_engine.zmq_engine
        import lmdeploy.pytorch.models.qwen2  # noqa: F401  # any model: what all of them import

        import sagellm.engines.lmdeploy.cpu.backend  # noqa: F401


def check_plugins(config: SageConfig) -> None:
    """Check what would otherwise end the engine process after the model is loaded.

    Raises:
        PluginError, ConfigError: an unknown plug-in or option, two owners of a decision, a record that cannot be written.
    """
    kinds = [(spec, find_plugin(spec.name)) for spec in all_plugins(config)]
    check_owners((spec.name, object.__new__(kind)) for spec, kind in kinds)  # not built: it lives in the engine process
    for spec, kind in kinds:
        try:
            inspect.signature(kind).bind(**spec.options)
        except TypeError as error:
            raise PluginError(f"plug-in {spec.name} does not take options {spec.options}: {error}.") from None
    if config.record is not None:
        try:
            config.record.open("a").close()
        except OSError as error:
            raise ConfigError(f"cannot write --record {config.record}: {error.strerror}.") from None


def _membership(config: SageConfig, device: str) -> "Membership | None":
    if config.pd is None:
        return None
    from sagellm.serve.group import join_group  # loads torch, which others do without here

    return join_group(config, config.pd, device, config.model_name)


def _hooks(config: SageConfig, member: "Membership | None", run_dir: Path) -> PDHooks | None:
    """Settings of an engine that exchanges keys and values with others; None for all others."""
    if config.sot_workers:
        from sagellm.serve.sot_workers import sot_hooks

        return sot_hooks(run_dir)
    return member.hooks if member else None


def _policies(config: SageConfig) -> tuple[str, ...]:
    """Eviction policies that clients may exchange: those known by name, and those that the server was started with."""
    kv = config.kv
    own = () if kv is None else (kv.policy, kv.cpu_policy, kv.disk_policy)
    return tuple(dict.fromkeys((*policy_names(), *own)))


@dataclass(frozen=True)
class Launch:
    """One start of the server: settings, what was made ready for it, and the objects that take part until its end.

    Attributes:
        sampling: what a request samples with where it does not say.
        engine_config: LMDeploy's configuration of the engine.
        can_fork: whether the engine's process may be a fork of this one.
        listener: the socket, bound and listening.
        run_dir: a folder for sockets, removed at the end.
        member: the server's part in a prefill/decode group, if it has one.
        log_config: configuration of uvicorn's loggers; None leaves those of the program as they are.
    """

    log_config: ClassVar[dict[str, Any] | None] = LOGGING_CONFIG
    config: SageConfig
    backend: Backend
    model: Path
    sampling: dict[str, float]
    engine_config: Any
    can_fork: bool
    listener: socket.socket
    banner: "_Banner"
    loading: Loading
    watch: EngineWatch
    run_dir: Path
    member: "Membership | None"

    def serve(self) -> int:
        """Start the engine and serve until the end; return the exit code."""
        skip_teardown()
        try:
            process = self._start_engine()
            with loading_libraries():  # while the engine starts
                import lmdeploy.serve.openai.api_server  # noqa: F401

                import sagellm.serve.validation  # noqa: F401

            self.open(processes=process)
        finally:
            self.watch.stop()
            end_children()
            self.watch.finish()
        return 1 if self.watch.engine_died else 0

    def open(self, on_built: Callable[[], None] = lambda: None, **parts: Any) -> None:
        """Build LMDeploy's engine and application, and serve them until the end.

        Args:
            on_built: called when the engine is built.
            parts: further parts of LMDeploy's server, see `sage_server.parts`.
        """
        from lmdeploy import sage_server
        from lmdeploy.serve.openai import api_server, protocol

        quiet_disconnects()

        def run_app(app: Any) -> None:
            on_built()
            self._run_app(app, api_server.VariableInterface.async_engine)

        sage_server.parts.update(
            run=run_app, usage=with_guesses(protocol.UsageInfo), chat_logprobs=chat_logprobs, **parts
        )
        try:
            api_server.serve(
                str(self.model),
                model_name=self.config.model_name,
                backend=self.backend.name,
                backend_config=self.engine_config,
                speculative_config=speculative_config(self.config),
                log_level=self.config.log_level,
                api_keys=list(self.config.api_key) or None,
            )
        finally:
            sage_server.parts.clear()

    def _start_engine(self) -> EngineProcess:
        """Start the engine's process, unless LMDeploy still changes its configuration, as it does for models that see."""
        process = EngineProcess(self.watch.watch)
        if self.backend.name == "pytorch" and not sees(self.model):
            if self.can_fork:
                _load_engine()
            self.engine_config.enable_mp_engine = True  # as LMDeploy sets it
            process.start(
                self.can_fork, model_path=str(self.model), engine_config=self.engine_config,
                log_level=logging.getLevelName(self.config.log_level), speculative_config=speculative_config(self.config),
                trust_remote_code=True,
            )  # fmt: skip
        return process

    def _run_app(self, app: Any, engine: Any) -> None:
        """Run LMDeploy's application, in place of `uvicorn.run` at the end of LMDeploy's `serve`."""
        with self._sot_group(engine) as sot_group:
            self._extend(app, engine, sot_group)
            self.loading.done()
            self._serve_app(app, engine)

    def _sot_group(self, engine: Any) -> "AbstractContextManager[Master | None]":
        """Workers of skeleton-of-thought. Started while SIGINT is blocked, so that they do not hear of Ctrl-C either."""
        if not self.config.sot_workers:
            return nullcontext()
        from sagellm.serve.sot_workers import sot_workers

        return sot_workers(self.config, engine, self.run_dir)

    def _serve_app(self, app: Any, engine: Any) -> None:
        server = self.server(app, engine)
        if self.member is not None and self.member.proxy_url:
            from sagellm.serve.registration import Registration

            server.registration = Registration(self.member, next(iter(self.config.api_key), ""), server.leave)
        if self.banner.device == "cpu":
            _yield_to_engine()
        server.run(sockets=[self.listener])
        self.watch.stop()
        if self.watch.engine_died:  # it may have been before `shutdown`
            self.backend.abandon(engine)
        engine.close()
        if server.registration is not None and server.registration.refusal:
            raise PeerError(server.registration.refusal)

    def server(self, app: Any, engine: Any) -> "_Server":
        """Return the server of LMDeploy's application and its `AsyncEngine`."""
        log_level = "info" if self.config.log_level in ("DEBUG", "INFO") else "warning"
        # uvicorn's annotation says int; it hands the value to asyncio, which takes fractions. Answers are ended before.
        longest_s = self.config.drain_timeout_s + LAST_WORDS_S
        settings = uvicorn.Config(
            app, log_level=log_level, log_config=self.log_config, timeout_graceful_shutdown=longest_s
        )
        hang_up = partial(self.backend.hang_up, engine)
        abandon = partial(self.backend.abandon, engine)
        return _Server(settings, self.banner, self.watch, engine.generate, self.config.drain_timeout_s, hang_up, abandon)

    def _extend(self, app: Any, engine: Any, sot_group: "Master | None") -> None:
        """Add our checks in front of LMDeploy's handlers, our generation after them, and our numbers to its metrics."""
        from lmdeploy.serve.openai.api_server import VariableInterface
        from starlette.middleware import Middleware

        from sagellm.serve.generation import GuardedGeneration
        from sagellm.serve.token_texts import by_token
        from sagellm.serve.validation import RequestValidation

        # Innermost, so that a refusal passes through the layer that lets browsers read it.
        middleware = Middleware(
            RequestValidation, engine=engine, interface=VariableInterface, member=self.member,
            policies=_policies(self.config), command=partial(self.backend.command, engine), trouble=lambda: self.watch.reason,
            max_body_bytes=int(self.config.max_body_mib * 2**20), sampling=self.sampling, sot_group=sot_group,
            describe=partial(self.backend.describe, self.banner.device),
        )  # fmt: skip
        app.user_middleware.append(middleware)
        engine.tokenizer.detokenize_incrementally = by_token(engine.tokenizer.detokenize_incrementally)
        engine.generate = GuardedGeneration(engine, self.watch.report_dead_loop)
        self.backend.extend(engine)


def _yield_to_engine() -> None:
    """Let this thread wait for its turn, where it would interrupt another as soon as it has something to do.

    The threads of a step wait for each other. One that a piece of text interrupts holds up all.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))


class _Server(uvicorn.Server):
    """Ends answers that are not finished with an error event, after the drain time, a second signal, or the engine's death.

    Args:
        generation: the layer that has the answers.
        drain_s: seconds that answers may take once the server is to end.
        hang_up: is called when the event loop is about to end.
        abandon: is called before LMDeploy closes an engine that died.
    """

    def __init__(
        self, config: uvicorn.Config, banner: "_Banner", watch: EngineWatch, generation: "GuardedGeneration", drain_s: float,
        hang_up: Callable[[], None], abandon: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(config)
        self._banner = banner
        self._watch = watch
        self._generation, self._drain_s, self._hang_up, self._abandon = generation, drain_s, hang_up, abandon
        self._loop: asyncio.AbstractEventLoop | None = None
        self.registration: Registration | None = None  # of an engine of a group
        watch.on_death(self._engine_died)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._banner.show()
            if self.registration is not None:
                await self.registration.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._watch.stop()  # from here on the engine process ends because it is told to
        if self._watch.engine_died:  # LMDeploy closes it below, which would wait until it has read what was sent to it
            self._abandon()
        if self.registration is not None:
            await self.registration.end()
        asyncio.get_running_loop().call_later(self._drain_s, self._generation.end_all, ENDING)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves the application's own end out then, and its cancellation prints a traceback
            await self.lifespan.shutdown()
        self._hang_up()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._captured_signals.append(sig)
        self.leave(at_once=self.should_exit)  # a second signal: the sender does not want to wait

    def leave(self, at_once: bool = False) -> None:
        """End in order, as by a signal. With `at_once` answers end now. From any thread."""
        if at_once:
            self._end_answers(ENDING)
        self.should_exit = True

    def _engine_died(self) -> None:
        self._end_answers(f"the engine has stopped: {self._watch.reason}")
        self.should_exit = True

    def _end_answers(self, reason: str) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._generation.end_all, reason)
            # Others may wait without a limit: for the engine, or for the rest of a body.
            self._loop.call_soon_threadsafe(self._loop.call_later, LAST_WORDS_S, setattr, self, "force_exit", True)


class _Banner:
    """The message of a server that is ready."""

    def __init__(self, config: SageConfig, device: str, sizes: Sizes, as_json: bool, out: TextIO) -> None:
        self._config, self._name, self.device, self._sizes = config, config.model_name, device, sizes
        self._as_json, self._out = as_json, out

    def show(self) -> None:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        url = f"http://{host}:{self._config.port}/v1"
        if self._as_json:
            facts = {"device": self.device, "dtype": self._sizes.dtype, "kv_blocks": self._sizes.num_blocks}
            facts["context_length"] = self._sizes.context_length
            self._say(json.dumps({"ready": True, "url": url, "model": self._name, "pid": os.getpid()} | facts))
        else:
            key = " -H 'Authorization: Bearer KEY'" if self._config.api_key else ""
            body = json.dumps(
                {
                    "model": self._name,
                    "stream": True,
                    "messages": [{"role": "user", "content": "What is the capital of France?"}],
                }
            )
            self._say(f"\nReady: {self._name} on {self.device} at {url}")
            self._say(
                f"KV pool: {self._sizes.num_blocks or 'chosen by LMDeploy'} blocks of {self._config.block_size} tokens, "
                f"{self._sizes.dtype}; plug-ins: {', '.join(spec.name for spec in all_plugins(self._config)) or 'none'}"
            )
            self._say(f"Try:\n  curl -N {url}/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n")

    def give_back(self) -> None:
        """Standard output is again what it was."""
        os.dup2(self._out.fileno(), 1)

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)
