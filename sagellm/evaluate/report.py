"""The result of an evaluation: JSON by pydantic, Markdown, plots."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sagellm.core.errors import ConfigError
from sagellm.core.figure import COLOURS, new_figure, save_figure

__all__ = ["Model", "ModelQuality", "QualityReport", "TextInfo", "compare_reports", "markdown", "write_plots"]

FORMAT_VERSION = 1


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TextInfo(Model):
    """The text of an evaluation. Figures on different texts cannot be compared.

    Attributes:
        python: version of Python that the text comes from.
        sha256: hash of the text.
        tokens: tokens of prose and code that were scored.
        chunk: tokens of a piece; each is scored by itself.
    """

    python: str
    sha256: str
    tokens: dict[str, int]
    chunk: int


class ModelQuality(Model):
    """One model beside the reference.

    Attributes:
        perplexity: by text: exp of the mean negative log-likelihood of a token.
        kl_mean, kl_p999: mean and 99.9th percentile of the Kullback-Leibler divergence of the next-token distribution from
            the reference's, in nats.
        same_top: share of positions with the reference's likeliest token.
        same_answers: share of greedy answers that are the reference's, token by token.
        parted_at: for each other answer, the number of its first tokens that are the reference's.
        same_in_batch: share of answers with a seed that stay the same when many are computed at once; None where that was
            not measured.
        seconds: time of scoring the texts.
    """

    name: str
    perplexity: dict[str, float]
    kl_mean: float
    kl_p999: float
    same_top: float
    same_answers: float | None
    parted_at: list[int]
    same_in_batch: float | None = None
    seconds: float


class QualityReport(Model):
    """An evaluation.

    Attributes:
        reference: name of the model that the others are compared with.
        answers: number of greedy answers, and tokens of each.
        versions: of the libraries that took part.
    """

    format_version: int = FORMAT_VERSION
    model: str
    reference: str
    text: TextInfo
    answers: tuple[int, int]
    models: list[ModelQuality]
    versions: dict[str, str]

    def of(self, name: str) -> ModelQuality:
        """
        Raises:
            ConfigError: no model of the report has this name.
        """
        found = {each.name: each for each in self.models}
        if name not in found:
            raise ConfigError(f"the report has no model {name!r}; it has {', '.join(found)}.")
        return found[name]

    @classmethod
    def read(cls, path: Path) -> "QualityReport":
        """Read a report.

        Args:
            path: a quality.json, or the folder that `write` put it into.

        Raises:
            ConfigError: there is no report.
        """
        file = path / "quality.json" if path.is_dir() else path
        try:
            return cls.model_validate_json(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}; give the folder of a report.") from None
        except ValidationError as error:
            found = error.errors()[0]
            where = ".".join(map(str, found["loc"])) or "the file"
            raise ConfigError(f"{file} is no report of quality: {where}: {found['msg']}.") from None

    def write(self, folder: Path) -> None:
        """Write quality.json, quality.md and plots into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "quality.json").write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        (folder / "quality.md").write_text(markdown(self), encoding="utf-8")
        write_plots(self, folder)


def compare_reports(one: QualityReport, other: QualityReport) -> list[tuple[str, str, float, float]]:
    """List the figures of models that both reports have: model, figure, value of one, value of the other.

    Raises:
        ConfigError: the reports are about different texts, or have no model in common.
    """
    if one.text != other.text:
        raise ConfigError(
            f"the reports are about different texts: Python {one.text.python} ({one.text.sha256[:8]}) and "
            f"{other.text.python} ({other.text.sha256[:8]}), chunks of {one.text.chunk} and {other.text.chunk}. Measure both "
            "with the same Python and settings."
        )
    rows = []
    for model in one.models:
        for same in (each for each in other.models if each.name == model.name):
            figures = _figures(same)
            rows += [(model.name, name, value, figures[name]) for name, value in _figures(model).items() if name in figures]
    if not rows:
        names = [", ".join(model.name for model in report.models) for report in (one, other)]
        raise ConfigError(f"the reports have no model of the same name: one has {names[0]}, the other {names[1]}.")
    return rows


def _figures(model: ModelQuality) -> dict[str, float]:
    found = {f"perplexity, {name}": value for name, value in model.perplexity.items()}
    found |= {"mean KL": model.kl_mean, "99.9% KL": model.kl_p999, "same top token": model.same_top}
    shares = {"same answers": model.same_answers, "same in a batch": model.same_in_batch}
    return found | {name: share for name, share in shares.items() if share is not None}


def markdown(report: QualityReport) -> str:
    """Return the report as a page with one table."""
    texts = list(report.text.tokens)
    heads = ["model", *(f"perplexity, {name}" for name in texts), "mean KL", "99.9% KL", "same top token", "same answers"]
    heads += ["answers part at (median)", "same in a batch", "s"]
    lines = [
        f"# Quality of {report.model}",
        "",
        f"Reference: {report.reference}. Text: "
        + ", ".join(f"{count:,} tokens of {name}" for name, count in report.text.tokens.items())
        + f", in pieces of {report.text.chunk}; Python {report.text.python}, SHA-256 {report.text.sha256[:16]}. "
        f"{report.answers[0]} greedy answers of {report.answers[1]} tokens. KL in nats.",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
    ]
    for model in report.models:
        parted = sorted(model.parted_at)
        cells: list[Any] = [model.name, *(f"{model.perplexity[name]:.4f}" for name in texts)]
        cells += [f"{model.kl_mean:.3g}", f"{model.kl_p999:.3g}", f"{100 * model.same_top:.3f}%"]
        cells += [_percent(model.same_answers)]
        cells += [f"{parted[len(parted) // 2]}" if parted else "", _percent(model.same_in_batch), f"{model.seconds:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", ", ".join(f"{name} {version}" for name, version in report.versions.items())]
    return "\n".join(lines) + "\n"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def write_plots(report: QualityReport, folder: Path) -> list[Path]:
    """Write kl.png (divergence by model) and answers.png (share of answers that are still the reference's, by token).

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    others = [model for model in report.models if model.name != report.reference]
    if not others:
        return []
    figure = new_figure(8, 4)
    axes = figure.subplots()
    names = [model.name for model in others]
    for marker, label, values in (
        ("o", "mean", [model.kl_mean for model in others]), ("^", "99.9%", [model.kl_p999 for model in others]),
    ):  # fmt: skip
        axes.plot(values, names, marker, label=label, color=COLOURS[marker == "^"])
    scale = "log" if any(model.kl_mean or model.kl_p999 for model in others) else "linear"  # log has no place for 0
    axes.set(xscale=scale, xlabel="KL divergence from the reference, nats", title=report.model)
    axes.grid(alpha=0.25)
    axes.legend()
    count, length = report.answers
    files = [save_figure(figure, folder / "kl.png")]
    if count:
        figure = new_figure(8, 4)
        axes = figure.subplots()
        for number, model in enumerate(others):
            same = [1 - sum(at <= place for at in model.parted_at) / count for place in range(length)]
            axes.plot(range(1, length + 1), same, label=model.name, color=COLOURS[number % len(COLOURS)])
        axes.set(ylim=(0, 1.02), xlabel="token of the answer", ylabel="answers like the reference's", title=report.model)
        axes.grid(alpha=0.25)
        axes.legend()
        files.append(save_figure(figure, folder / "answers.png"))
    return files
