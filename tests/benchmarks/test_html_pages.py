"""HTML pages as documents with sections."""

from _scripts import load
from _texts import write

pages = load("html_pages")
Section = pages.Section


def test_html_sections(tmp_path):
    text = """<!DOCTYPE html><html><head><title>Page &amp; more</title><style>p {}</style>
<script>if (a < b) {}</script></head>
<body><header><p>menu</p></header><nav>skip <nav>inner</nav> me</nav><div role="navigation"><div>no</div> no</div>
<p>Before
   it.<h2>First<a class="headerlink" href="#x">¶</a></h2><p>One <b>bold</b>&nbsp;word<br>new line</p>
<pre>def f():
    return  1
</pre><h3><code>sub</code> title</h3><ul><li>a<li>b</ul><table><tr><td>c</td><td>d</td></tr></table>
<p hidden>unseen</p><footer>contact</footer></body></html>"""
    write(tmp_path, a__html=text)
    write(tmp_path / "b", c__html="<title>Only this</title><p>text")
    found, untitled = pages.read_pages(tmp_path)
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
