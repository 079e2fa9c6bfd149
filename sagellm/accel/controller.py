"""One controller for everything that makes a model faster: quantized weights and speculation, on the real engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sagellm.accel.quantization.base import BaseQuantizer
from sagellm.accel.quantization.cache import quantized_copy
from sagellm.accel.quantization.calibration import Calibration
from sagellm.accel.quantization.profile import ALIGNMENT_NAME
from sagellm.accel.quantization.registry import make_quantizer
from sagellm.accel.speculative.registry import make_speculator
from sagellm.core.config import SageConfig
from sagellm.core.engines import answer_greedily, check_engine, open_engine, write_alignment
from sagellm.core.errors import ConfigError, QuantizationError
from sagellm.models import find_model, prepare_model

__all__ = ["AccelConfig", "AccelController", "SpeculativeRun"]

GUESSES, STRATEGY = 4, "ngram"  # where the configuration does not say


class AccelConfig(BaseModel):
    """Settings of quantization, sparse attention and speculation.

    Attributes:
        enable_quantization: whether `get_quantized_model` may be called.
        method: quantization method: a name of `sagellm list quantizer`, or `module:Class`.
        options: of the method.
        enable_sparsity: whether decode steps read some of their KV blocks; not together with speculation.
        sparsity: sparse policy: a name of `sagellm list sparsity`, or `module:Class`.
        sparsity_options: of the policy.
        speculative_tokens: most guesses of a sequence and step; 0 decodes without guesses.
        draft_model: smaller model that guesses; None lets the strategy `ngram` guess.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_quantization: bool = False
    method: str | None = Field(None, min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)
    enable_sparsity: bool = False
    sparsity: str = Field("quest", min_length=1)
    sparsity_options: dict[str, Any] = Field(default_factory=dict)
    speculative_tokens: int = Field(0, ge=0, le=64)
    draft_model: str | None = Field(None, min_length=1)


@dataclass(frozen=True)
class SpeculativeRun:
    """Answers with guesses, and what the guesses were worth.

    Attributes:
        texts: one answer a prompt.
        is_same: whether all answers are those without guesses.
        acceptance: share of guesses that were right; 0 where none was made.
        tokens_per_step: tokens of a sequence that a decode step yields.
        speedup: tokens a second over those without guesses, in one run.
    """

    texts: tuple[str, ...]
    is_same: bool
    acceptance: float
    tokens_per_step: float
    speedup: float


class AccelController:
    """Quantizes a model and decodes with guesses.

    Use `setup`, which checks everything before an engine starts:

        controller = AccelController.setup({"enable_quantization": True, "method": "int8"}, model="smollm2")
        folder = controller.get_quantized_model()
    """

    def __init__(self, config: AccelConfig, settings: SageConfig, quantizer: BaseQuantizer | None) -> None:
        self.config = config
        self._settings, self._quantizer = settings, quantizer

    @classmethod
    def setup(
        cls, config: AccelConfig | dict[str, Any] | None = None, model: str | Path | None = None, **settings: Any
    ) -> "AccelController":
        """Check a configuration against a model and this machine.

        Args:
            model: as `--model` of the server; None is the default model.
            settings: further fields of `SageConfig`, such as device, dtype and threads.

        Raises:
            ConfigError: a field is invalid, fields contradict each other, or the device or its memory is too small.
            ModelError: the model or the draft model cannot be had or served.
            QuantizationError: the method is unknown, or the model cannot be quantized by it.
            SpeculationError: the draft model does not fit the model.
        """
        try:
            checked = config if isinstance(config, AccelConfig) else AccelConfig.model_validate(config or {})
            common = SageConfig(model=None if model is None else Path(model), **settings)
        except ValidationError as error:
            raise ConfigError("; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())) from None
        if checked.enable_quantization != (checked.method is not None):
            raise ConfigError("enable_quantization and method belong together; give both, or neither.")
        if checked.draft_model is not None and not checked.speculative_tokens:
            raise ConfigError("draft_model needs speculative_tokens; give at least 1.")
        quantizer = None
        if checked.method is not None:
            quantizer = make_quantizer(checked.method, **checked.options)
            folder = prepare_model(find_model(common.model))
            quantizer.check(folder)
        if checked.speculative_tokens:
            common = common.model_copy(update=_speculation(checked))
            make_speculator(common.speculative, **common.speculative_options)
        if checked.enable_sparsity:
            common = common.model_copy(update={"sparsity": checked.sparsity, "sparsity_options": checked.sparsity_options})
        check_engine(common)
        return cls(checked, common, quantizer)

    @property
    def settings(self) -> SageConfig:
        """Settings of an engine with all of it but the quantized model, which `get_quantized_model` gives."""
        return self._settings

    def get_quantized_model(self, model: str | Path | None = None, calibration: Calibration | None = None) -> Path:
        """Return a folder that `--model` takes: the model, quantized. The first call makes it, with its alignment report.

        Args:
            model: by default that of `setup`.
            calibration: texts; None is `Calibration.default()`.

        Raises:
            QuantizationError, ModelError: quantization is switched off, or the model cannot be quantized.
        """
        if self._quantizer is None:
            raise QuantizationError("quantization is switched off; set enable_quantization and a method.")
        source = prepare_model(find_model(self._settings.model if model is None else model))
        folder = quantized_copy(source, self._quantizer, calibration)
        if not (folder / ALIGNMENT_NAME).is_file():
            write_alignment(folder, source)
        return folder

    def run_speculative_decode(self, prompts: Sequence[str], max_new_tokens: int = 64) -> SpeculativeRun:
        """Answer prompts greedily with guesses, and once without them for comparison.

        With quantization the quantized model answers.

        Raises:
            ConfigError: `speculative_tokens` is 0, or there is no prompt.
        """
        if not self.config.speculative_tokens:
            raise ConfigError("speculation is switched off; set speculative_tokens.")
        if not prompts:
            raise ConfigError("run_speculative_decode got no prompt; give at least one.")
        from transformers import AutoTokenizer

        folder = self.get_quantized_model() if self._quantizer else prepare_model(find_model(self._settings.model))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        asked = [tokenizer(prompt).input_ids for prompt in prompts]
        stop = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        settings = self._settings.model_copy(update={"model": folder})
        plain = settings.model_copy(update={"speculative": None, "speculative_options": {}})
        runs = []
        for each in (plain, settings):
            engine = open_engine(each)
            try:
                answer_greedily(engine, asked[:1], 2)  # the first step of an engine is slower
                runs.append(answer_greedily(engine, asked, max_new_tokens, stop))
                report = engine.hooks.report()["speculation"]
            finally:
                engine.close()
        speeds = [sum(len(one.token_ids) for one in run) / max(one.token_s[-1] for one in run) for run in runs]
        return SpeculativeRun(
            texts=tuple(tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in runs[1]),
            is_same=[one.token_ids for one in runs[0]] == [one.token_ids for one in runs[1]],
            acceptance=report["accepted"] / max(1, report["drafted"]),
            tokens_per_step=1 + report["accepted"] / max(1, report["sequences"]),
            speedup=speeds[1] / speeds[0],
        )  # fmt: skip


def _speculation(config: AccelConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"lookahead": config.speculative_tokens}
    if config.draft_model is None:
        return {"speculative": STRATEGY, "speculative_options": options}
    return {"speculative": "draft", "speculative_options": options | {"model": config.draft_model}}
