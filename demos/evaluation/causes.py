"""Heatmaps against causes: what becomes of an image when a word may not be looked at?

For each image that is right: does a noun's map rank the cells as the change does when the noun is
gone? The control is the map of the other object's noun: a map that only tells objects from ground
would agree as well with the change of either. And what stays without a word: its object, its
object's colour, the other objects?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from sdattn import Heatmap
from sdattn.control.knockouts import Knockout, draw_without, prepare

from ..scenes.shapes import Word
from .images import Sample
from .measures import rank_correlation
from .records import Records
from .seeing import Seen, Subject

SPANS = {"all steps": (0.0, 1.0), "second half": (0.5, 1.0)}  # in which the word is gone


def causes(subject: Subject, images: Iterable[Sample], records: Records) -> None:
    """Record what becomes of each image without each of its nouns and colour words, which is gone
    for all steps, or for the second half of them."""
    for image in images:
        if image.masks is None:
            continue
        said = image.scene.words(image.prompt)
        words = knocked_out(said)
        texts = [word.text for word in words]
        for span, steps in SPANS.items():
            options = dict(subject.settings)
            plan = prepare(subject.pipe, image.prompt, image.seed, steps=steps, options=options)
            done = draw_without(plan, texts, batch_size=8)
            of_nouns = [one for one, word in zip(done, words, strict=True) if word.kind == "noun"]
            agreement(image, of_nouns, span, records)
            after = subject.see([image.scene] * len(done), [one.without for one in done])
            for word, seen in zip(words, after, strict=True):
                for measure, there in stays(said, word, image.seen, seen).items():
                    key = "without", word.kind, span, measure
                    records.add(key, image.number, np.array([float(there)]))


def knocked_out(words: Sequence[Word]) -> list[Word]:
    """Return each noun, and the colour words that are about one thing alone."""
    counts = Counter(word.text for word in words)
    nouns = {word.text: word for word in words if word.kind == "noun"}
    colours = [word for word in words if word.kind == "colour" and counts[word.text] == 1]
    return [*nouns.values(), *colours]


def agreement(image: Sample, done: Sequence[Knockout], span: str, records: Records) -> None:
    """Record how far the map of each noun ranks cells as the change without it does, by every way
    to make maps that the image has."""
    words = [one.word for one in done]
    for variant, heatmaps in image.heatmaps.items():
        key = "causes", "noun", variant
        found = [_agreement(heatmaps[one.word], one.heatmap) for one in done]
        records.add((*key, span), image.number, np.array(found))
        if len(words) == 2:
            others = zip(words[::-1], done, strict=True)
            found = [_agreement(heatmaps[word], one.heatmap) for word, one in others]
            records.add((*key, f"{span}, control"), image.number, np.array(found))


def _agreement(one: Heatmap, change: Heatmap) -> float:
    rows, cols = change.values.shape
    return rank_correlation(one.resize((rows, cols)).numpy(), change.values.numpy())


def stays(words: Sequence[Word], word: Word, before: Seen, after: Seen) -> dict[str, bool]:
    """Return what is still there without one of a scene's words: its object's noun; for a colour
    word that object in that colour; and all other nouns, if there are any. Empty if the object did
    not have the colour to begin with."""
    nouns = {one.owner: one.text for one in words if one.kind == "noun"}
    own, there = nouns[word.owner], {noun for noun, _ in after.things}
    found = {"noun": own in there}
    if word.kind == "colour":
        if (own, word.text) not in before.things:
            return {}
        found["colour"] = (own, word.text) in after.things
    if others := {*nouns.values()} - {own}:
        found["others"] = others <= there
    return found
