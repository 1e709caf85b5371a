"""The figures of the demo as a table, sentences and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from st_magnitude import geometry
from st_magnitude._plot import pyplot
from st_magnitude.commands.demo.measure import Controls, Measurement

__all__ = ["comparison", "comparisons", "controls_report", "plot_norms", "table"]

Array = NDArray[np.float64]


def table(measured: Mapping[str, Measurement]) -> str:
    """The figures side by side, one column for each model."""
    rows: list[tuple[str, Callable[[Measurement], str]]] = [
        ("nDCG@10, scored as trained", lambda m: f"{m.matched.mean():.3f}"),
        ("nDCG@10, scored by cosine", lambda m: f"{m.cosine.mean():.3f}"),
        ("nDCG@10, scored by dot", lambda m: f"{m.dot.mean():.3f}"),
        ("document exponent, chosen on dev", lambda m: f"{m.exponent:.2f}"),
        ("nDCG@10 at that exponent", lambda m: f"{m.chosen.mean():.3f}"),
        ("  boilerplate among the top 10", lambda m: f"{m.boilerplate_in_top_10:.0%}"),
        ("Cohen's d of norms, answers - boilerplate", lambda m: f"{m.cohens_d:+.2f}"),
        ("  with text length regressed out", lambda m: f"{m.cohens_d_without_length:+.2f}"),
        ("AUC of the norm for 'answers a query'", lambda m: f"{m.auc:.3f}"),
        ("index halved by norm: answers kept", lambda m: f"{m.relevant_kept:.0%}"),
        ("  nDCG@10 of that half", lambda m: f"{m.pruned.mean():.3f}"),
        ("nDCG@10 with all boilerplate removed", lambda m: f"{m.clean.mean():.3f}"),
    ]
    width = max(len(label) for label, _ in rows)
    lines = ["".ljust(width) + "".join(f"{name:>12}" for name in measured)]
    lines += [label.ljust(width) + "".join(f"{value(m):>12}" for m in measured.values()) for label, value in rows]
    return "\n".join(lines)


def comparison(name: str, a: Array, b: Array) -> str:
    """One line on the paired difference of two per-query scores, with a 95 % bootstrap interval."""
    gain, low, high = geometry.paired_bootstrap(a, b)
    verdict = "a tie" if low <= 0 <= high else ("better" if gain > 0 else "worse")
    return f"{name}: {gain:+.3f} [{low:+.3f}, {high:+.3f}] nDCG@10, {verdict}"


def comparisons(measured: Mapping[str, Measurement], controls: Controls) -> list[str]:
    """The comparisons that the demo prints: first what fine-tuning gains, then what the norm adds and costs."""
    before, cosine, qnorm = measured["pretrained"], measured["cosine"], measured["qnorm"]
    calibrated = f"qnorm at exponent {qnorm.exponent:g}"
    return [
        comparison("cosine - pretrained", cosine.chosen, before.chosen),
        comparison("half the index: qnorm - cosine", qnorm.pruned, cosine.pruned),
        comparison("qnorm as trained - cosine", qnorm.matched, cosine.matched),
        comparison(f"{calibrated} - cosine", qnorm.chosen, cosine.matched),
        comparison("pretrained + surface prior - pretrained", controls.prior, before.chosen),
        comparison(f"{calibrated} - pretrained + surface prior", qnorm.chosen, controls.prior),
    ]


def controls_report(controls: Controls) -> str:
    """The controls in sentences."""
    correlation, gain = controls.correlation_with_norm, controls.prior.mean()
    return (
        f"  A classifier on length and punctuation has an AUC of {controls.auc:.3f} for 'answers a query'.\n"
        f"  Its logit correlates with the norm of the qnorm model at {correlation:+.2f} (Spearman).\n"
        f"  Pretrained cosine + {controls.prior_weight:g} x its log-probability has an nDCG@10 of {gain:.3f}."
    )


def plot_norms(measured: Mapping[str, Measurement], answers: NDArray[np.bool_], path: Path) -> None:
    """Histograms of document norms, answers against boilerplate, one panel for each model."""
    plt = pyplot()
    figure, axes = plt.subplots(
        1, len(measured), figsize=(4 * len(measured), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (name, m) in zip(axes[0], measured.items(), strict=True):
        bins = np.linspace(m.norms.min(), m.norms.max(), 41).tolist()
        axis.hist(m.norms[~answers], bins=bins, alpha=0.65, color="#9a9a9a", label="boilerplate, never relevant")
        axis.hist(m.norms[answers], bins=bins, alpha=0.65, color="#1f6fb4", label="answers a query")
        axis.set_title(f"{name}: d = {m.cohens_d:+.2f}, AUC = {m.auc:.2f}", fontsize=10)
        axis.set_xlabel("norm of the document embedding")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("documents")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
