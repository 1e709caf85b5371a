"""Draws the systems of a decision, with the interval of what is deployed over each.

    st-magnitude train --data banking77.csv --output my-retriever --json > train.json
    python benchmarks/decision.py train.json docs/decision.png

A row is a search of the queries of dev, as in the table that `train` prints.
"""

import json
import sys
from pathlib import Path

COLORS = {1: "#1a73e8", 0: "#9aa0a6", -1: "#d93025"}  # what is deployed is better, open, worse


def draw(dev: dict, file: Path) -> None:
    import matplotlib.pyplot as plt

    rows = dev["rows"]
    figure, axis = plt.subplots(figsize=(7, 0.35 * len(rows) + 1), layout="constrained")
    axis.axvline(0, color="black", linewidth=1)
    for place, row in enumerate(rows):
        gain = row["gain"]
        if gain is None:
            axis.text(0.7, place, "the deployed search", va="center")
            continue
        low, mean, high = (100 * gain[key] for key in ("low", "mean", "high"))
        color = COLORS[(low > 0) - (high < 0)]
        axis.plot([low, high], [place, place], color=color, linewidth=3)
        axis.plot(mean, place, marker="o", color=color, markersize=5)
    axis.set_yticks(range(len(rows)), [f"{row['name']}  {row['ndcg']:.4f}" for row in rows])
    axis.invert_yaxis()
    axis.tick_params(left=False)
    axis.set_xlabel("points that the deployed search gains, 95 % interval")
    axis.spines[["top", "right", "left"]].set_visible(False)
    title = f"Searches, and their nDCG@10 on {dev['queries']:,} queries"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.savefig(file, dpi=100, facecolor="white")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["dev"], Path(sys.argv[2]))
