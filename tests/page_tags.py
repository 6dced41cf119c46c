"""Reads a page of HTML strictly: what opens closes, and every tag, attribute and word can be looked
at.
"""

from html.parser import HTMLParser

# Elements that have no end, by the HTML standard.
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta"}
VOID |= {"source", "track", "wbr"}


class Tags(HTMLParser):
    """`all` tags with their attributes, and the `text` between them."""

    def __init__(self, page):
        super().__init__()
        self.open, self.all, self.text = [], [], []
        self.feed(page)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.all.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.all.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert tag not in VOID, f"</{tag}>"
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)

    def count(self, tag):
        return sum(name == tag for name, _ in self.all)
