"""Lines of a batch, read one by one."""

import json

from sdattn.batch.input.items import read_items


def line_of(**fields):
    """A line of JSON with a prompt."""
    return json.dumps({"prompt": "a red cat", **fields}).encode()


def read_one(line, kind="jsonl", **options):
    [item], bad = read_items(line, kind, **options)
    assert bad == []
    return item


def check_message(bad):
    assert bad.reason.isprintable() and 10 < len(bad.reason) < 600
    assert bad.text.isprintable() and len(bad.text) <= 200
