"""Pages of HTML, whose section titles ask for chunks; some pages are held out."""

from _texts import fold, write
from benchmarks.data import python_docs as titles
from benchmarks.data.python_docs import Page, Section

PAGES = [
    Page("Just a text. It has no title.", "plain.txt"),
    Page(
        "",
        "tea",
        sections=(
            Section("Tea", "It is a drink."),
            Section("1.2 Green tea", "Use 80 degrees. Wait two minutes."),
            Section("Storing", "Keep it dry."),
            Section("See also", "Coffee."),
            Section("Empty", ""),
            Section("Notice", "All rights reserved."),
        ),
    ),
    Page(
        "",
        "bread",
        sections=(
            Section("Storing", "In a box."),
            Section("Sourdough", "Feed the starter. Fold the dough."),
            Section("Terms", "All rights reserved."),
        ),
    ),
]


def test_titles_ask_for_their_sections():
    """A generic title, one that occurs twice, and one without text of its own ask for nothing."""
    task = titles.title_task(PAGES, max_words=4)
    found = {task.queries[q]: {task.corpus[d] for d in docs} for q, docs in task.relevant.items()}
    assert found == {
        "Tea": {"It is a drink."},
        "Green tea": {"Use 80 degrees.", "Wait two minutes."},
        "Sourdough": {"Feed the starter.", "Fold the dough."},
    }
    assert len(task.corpus) == 11
    whole = titles.title_task([Page("Bread\nRye.", "rye", title="Bread")], max_words=4)
    assert (whole.queries, list(whole.corpus.values())) == ({"q0": "Bread"}, ["Rye."])


def test_the_split_is_by_text():
    pages = [Page(f"Text number {i} of many.") for i in range(300)]
    train, held_out = titles.split_pages(pages, 0.2)
    assert train + held_out == sorted(pages, key=lambda page: (page in held_out, pages.index(page)))
    assert titles.split_pages(pages[::-1], 0.2)[1] == held_out[::-1]
    more = titles.split_pages(pages + [Page(f"Another one: {i}") for i in range(300)], 0.2)[1]
    assert {*held_out} <= {*more}  # new pages move no others
    left, right = titles.split_pages([Page("a text"), Page(" A  Text\n"), *pages], 0.4)
    assert not {fold(page.text) for page in left} & {fold(page.text) for page in right}


def test_html_sections(tmp_path):
    text = """<!DOCTYPE html><html><head><title>Page &amp; more</title><style>p {}</style>
<script>if (a < b) {}</script></head>
<body><header><p>menu</p></header><nav>skip <nav>inner</nav> me</nav>
<div role="navigation"><div>no</div> no</div>
<p>Before
   it.<h2>First<a class="headerlink" href="#x">¶</a></h2>
<p>One <b>bold</b>&nbsp;word<br>new line</p>
<pre>def f():
    return  1
</pre><h3><code>sub</code> title</h3><ul><li>a<li>b</ul><table><tr><td>c</td><td>d</td></tr></table>
<p hidden>unseen</p><footer>contact</footer></body></html>"""
    write(tmp_path, a__html=text)
    write(tmp_path / "b", c__html="<title>Only this</title><p>text")
    found, untitled = titles.read_pages(tmp_path)
    assert found.sections == (
        Section("", "Before it."),
        Section("First", "One bold word\nnew line\n\ndef f():\n    return  1", 1),
        Section("sub title", "a\n\nb\n\nc d", 2),
    )
    assert (found.name, found.title) == ("a.html", "First")
    first, second, third = (section.text for section in found.sections)
    assert found.text == "\n\n".join([first, "First", second, "sub title", third])
    assert (untitled.name, untitled.title, untitled.text) == ("b/c.html", "Only this", "text")
    assert untitled.sections == ()
