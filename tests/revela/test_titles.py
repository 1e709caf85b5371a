"""A retrieval task from documents alone: section titles, or first sentences, ask for chunks."""

import re

import pytest
from _texts import CODE, write

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.revela import Document, title_task

PAGES = {
    "tea.md": "# Tea\nIt is a drink.\n\n## 1.2 Green tea\nUse 80 degrees. Wait two minutes.\n\n"
    "### Storing\nKeep it dry.\n\n"
    "## See also\nCoffee.\n\n## Empty\n\n## Notice\nAll rights reserved.\n",
    "bread.md": "# Bread\n\n## Storing\nIn a box.\n\n## Sourdough\nFeed the starter. Fold the dough.\n\n"
    "## Terms\nAll rights reserved.\n",
    "plain.txt": "Just a text. It has no title.",
}


def test_titles_ask_for_their_sections(tmp_path):
    write(tmp_path, **{name.replace(".", "__"): text for name, text in PAGES.items()})
    task = title_task(tmp_path, max_words=4)
    found = {task.queries[q]: {task.corpus[d] for d in docs} for q, docs in task.relevant.items()}
    assert found == {
        "Tea": {"It is a drink."},
        "Green tea": {"Use 80 degrees.", "Wait two minutes."},
        "Sourdough": {"Feed the starter.", "Fold the dough."},
    }  # "Storing" occurs twice, "See also" is generic, "Bread" and "Empty" have no text, the notice is on two pages
    assert sorted(task.corpus.values()) == sorted(
        [
            "It is a drink.",
            "Use 80 degrees.",
            "Wait two minutes.",
            "Keep it dry.",
            "Coffee.",
            "All rights reserved.",
            "In a box.",
            "Feed the starter.",
            "Fold the dough.",
            "Just a text.",
            "It has no title.",
        ]
    )
    assert not {"Green tea", "Tea", "Sourdough"} & {line for text in task.corpus.values() for line in text.split("\n")}
    task.save(tmp_path / "beir")
    assert RetrievalData.from_beir(tmp_path / "beir").corpus == task.corpus


def test_a_title_of_a_whole_document():
    task = title_task(
        [{"text": "Green tea\nUse 80 degrees.", "title": "Green tea"}, {"text": "Rye.", "title": "Bread"}]
    )
    assert task.queries == {"q0": "Green tea", "q1": "Bread"}
    assert list(task.corpus.values()) == ["Use 80 degrees.", "Rye."]


def test_a_sample_of_the_queries():
    documents = [Document(f"Text {i}.", f"d{i}", title=f"Title {'ab' * i}") for i in range(1, 20)]
    full, some, again, other = (
        title_task(documents, max_queries=n, seed=seed) for n, seed in ((None, 0), (5, 0), (5, 0), (5, 1))
    )
    assert len(full.queries) == 19
    assert len(some.queries) == 5 == len(some.relevant)
    assert some == again
    assert some.queries != other.queries
    assert some.corpus == full.corpus
    assert set(some.queries.values()) <= set(full.queries.values())


def test_without_titles_first_sentences_ask(caplog):
    texts = ["Green tea wants cooler water. Use 80 degrees. Wait.", "Alone in its chunk it stands."]
    task = title_task([*texts, Document(CODE, code=True)])
    assert "no section titles; first sentences ask" in caplog.text
    assert task.queries == {"q0": "Green tea wants cooler water."}
    assert task.corpus[next(iter(task.relevant["q0"]))] == "Use 80 degrees. Wait."
    assert len(task.corpus) == 3
    assert task.queries["q0"] not in " ".join(task.corpus.values())
    with pytest.raises(ValueError, match="The 1 documents give no queries; pass documents with section titles"):
        title_task(["one"])


def test_a_name_that_repeats_keeps_its_chunks_apart():
    task = title_task(
        [Document("One here.", "same", title="First"), Document("Two here.", "same\tname", title="Second")]
    )
    assert sorted(task.corpus) == ["same name#0", "same#0"]
    task = title_task([Document("One here.", "same", title="First"), Document("Two here.", "same", title="Second")])
    assert sorted(task.corpus) == ["same#0", "same#1"]
    assert all(re.fullmatch(r"q\d+", q) for q in task.queries)
