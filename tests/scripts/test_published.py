"""Published protocols: scores against scikit-learn and by hand, folders of each data set's form."""

import json
import math
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from helpers.tiny_pipelines import make_pipeline
from helpers.tiny_tokenizers import tiny_tokenizer
from PIL import Image
from sklearn.metrics import accuracy_score, average_precision_score, confusion_matrix, jaccard_score

from scripts.evaluation import evaluate_published
from scripts.evaluation.published import data, protocols
from scripts.evaluation.published.scores import (
    IGNORED,
    Confusion,
    Labelled,
    ap_of_both,
    iou,
    iou_interval,
)
from sdattn import Heatmaps, explain, read_prompt
from sdattn.models.facts import default_size

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)


# Scores


def labels(classes, size=(12, 9)):
    return RNG.integers(0, classes, size).astype(np.uint8)


def test_ious_are_those_of_scikit_learn_over_the_whole_data_set():
    counts, pairs = Confusion(5), []
    for size in ((12, 9), (4, 4), (7, 1)):
        found, truth = labels(4, size), labels(4, size)
        counts.add(found, truth)
        pairs.append((truth.ravel(), found.ravel()))
    truth, found = (np.concatenate(side) for side in zip(*pairs, strict=True))
    assert (counts.counts == confusion_matrix(truth, found, labels=range(5))).all()
    expected = jaccard_score(truth, found, labels=range(4), average=None)
    assert counts.ious[:4] == pytest.approx(list(expected))
    assert counts.ious[4] is None  # in no image
    assert counts.mean_iou == pytest.approx(expected.mean())
    assert counts.accuracy == pytest.approx(accuracy_score(truth, found))


def test_of_two_classes_the_printed_number_is_no_mean_iou():
    counts = Labelled()
    truth = np.array([[1, 1, 0, 0], [0, 0, 0, IGNORED]], dtype=np.uint8)
    found = np.array([[1, 0, 1, 0], [0, 0, 0, 1]], dtype=np.uint8)
    counts.add(found, truth)
    # foreground 1 of 3, background 4 of 6, right 5 of 7
    assert counts.ious == pytest.approx([4 / 6, 1 / 3])
    assert counts.mean_iou == pytest.approx(1 / 2)
    assert counts.accuracy == pytest.approx(5 / 7)
    assert counts.printed_iou == pytest.approx((5 / 7) / (2 - 5 / 7)) == pytest.approx(5 / 9)


@pytest.mark.parametrize(("accuracy", "printed"), [(83.1, 71.0), (78.5, 64.6), (64.5, 47.6)])
def test_the_printed_numbers_of_the_paper_follow_from_accuracies(accuracy, printed):
    right = round(accuracy * 10)
    counts = Labelled()
    counts.add(np.ones((1, right), np.uint8), np.ones((1, right), np.uint8))
    counts.add(np.zeros((1, 1000 - right), np.uint8), np.ones((1, 1000 - right), np.uint8))
    assert 100 * counts.printed_iou == pytest.approx(printed, abs=0.15)


def test_precision_is_that_of_scikit_learn_over_both_classes():
    truth, values = labels(2), RNG.random((12, 9)).round(1)  # with ties
    truth[0, :3] = IGNORED
    scaled = (values - values.min()) / (values.max() - values.min())
    known = truth != IGNORED
    both = np.stack([1 - scaled, scaled])[:, known].ravel()
    hot = np.stack([truth == 0, truth == 1])[:, known].ravel()
    assert ap_of_both(values, truth) == pytest.approx(average_precision_score(hot, both))


def test_single_ious_and_their_interval():
    a, b = np.array([[True, True, False]]), np.array([[False, True, True]])
    assert iou(a, b) == 1 / 3 and iou(a, a) == 1 and iou(a, ~a) == 0
    assert iou(a & False, b & False) == 1
    mean, half = iou_interval([0.2, 0.4, 0.9])
    spread = math.sqrt(((0.3**2) + (0.1**2) + (0.4**2)) / 2)
    assert (mean, half) == pytest.approx((0.5, 1.96 * spread / math.sqrt(3)))
    assert math.isnan(iou_interval([0.3])[1])


def test_labels_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 2\) against a truth of \(3, 3\)"):
        Labelled().add(np.zeros((2, 2), np.uint8), np.zeros((3, 3), np.uint8))


# Folders


def new_image(seed, size=(20, 30)):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)


def truth_of(kind, size=(20, 30)):
    found = np.zeros(size, np.uint8)
    found[5:15, 10:20] = kind
    return found


def imagenet(folder):
    """As MATLAB writes it: references to columns-first arrays, the truth in a cell of a cell."""
    references = h5py.special_dtype(ref=h5py.Reference)
    names = ("n02121620_1", "n02084071_22")
    with h5py.File(folder / "gtsegs_ijcv.mat", "w") as file:
        parts = {"img": [], "gt": [], "id": []}
        for i, name in enumerate(names):
            image = file.create_dataset(f"#refs#/i{i}", data=new_image(i).transpose(2, 1, 0))
            truth = file.create_dataset(f"#refs#/g{i}", data=truth_of(1).T)
            cell = file.create_dataset(f"#refs#/c{i}", (1, 1), dtype=references)
            cell[0, 0] = truth.ref
            text = np.array([[ord(letter)] for letter in name], dtype=np.uint16)
            word = file.create_dataset(f"#refs#/t{i}", data=text)
            for key, of in zip(parts, (image, cell, word), strict=True):
                parts[key].append(of.ref)
        for key, held in parts.items():
            column = file.create_dataset(f"value/{key}", (len(held), 1), dtype=references)
            for i, reference in enumerate(held):
                column[i, 0] = reference
    text = "n02121620 cat, true cat\nn02084071 dog, domestic dog, Canis familiaris\n"
    (folder / "LOC_synset_mapping.txt").write_text(text)


def voc(folder):
    for name in ("ImageSets/Segmentation", "JPEGImages", "SegmentationClass"):
        (folder / name).mkdir(parents=True)
    both = truth_of(8)
    both[:3] = 12
    both[16:18] = IGNORED
    images = {"one": truth_of(12), "two": both}
    (folder / "ImageSets/Segmentation/val.txt").write_text("\n".join(images) + "\n")
    for i, (name, truth) in enumerate(images.items()):
        Image.fromarray(new_image(i)).save(folder / f"JPEGImages/{name}.jpg")
        made = Image.fromarray(truth, mode="P")
        made.putpalette(RNG.integers(0, 256, 768).astype(np.uint8).tolist())
        made.save(folder / f"SegmentationClass/{name}.png")


def daam(folder):
    for number, words in (("7", ["cat"]), ("12", ["dog", "cat"])):
        (folder / number).mkdir()
        (folder / number / "prompt.txt").write_text(f"a red {' and a '.join(words)}\n")
        (folder / number / "seed.txt").write_text("3\n")
        for i, word in enumerate(words):
            alpha = np.zeros((64, 64, 4), np.uint8)
            alpha[10 * i : 10 * i + 20, 8:30, 3] = 255
            Image.fromarray(alpha).save(folder / number / f"{word}.gt.png")


def test_imagenet_segmentation_is_read(tmp_path):
    imagenet(tmp_path)
    first, second = data.imagenet_seg(tmp_path)
    assert (first.words, second.words) == ({1: "cat"}, {1: "dog"})
    assert (np.array(second.image) == new_image(1)).all() and (second.truth == truth_of(1)).all()
    (tmp_path / "LOC_synset_mapping.txt").write_text("n1 cat\n")
    with pytest.raises(KeyError, match="n02121620_1 is of n02121620"):
        next(data.imagenet_seg(tmp_path))


def test_voc_is_read(tmp_path):
    voc(tmp_path)
    first, second = data.voc(tmp_path)
    assert (first.words, second.words) == ({12: "dog"}, {8: "cat", 12: "dog"})
    assert second.truth[17, 0] == IGNORED and second.truth[0, 0] == 12 and second.truth[6, 12] == 8
    assert len(data.VOC_CLASSES) == 21 and data.VOC_CLASSES[20] == "tv monitor"


def test_coco_gen_is_read(tmp_path):
    daam(tmp_path)
    twelve, seven = data.coco_gen(tmp_path)
    assert (twelve.prompt, twelve.seed, [*twelve.masks]) == (
        "a red dog and a cat",
        3,
        ["cat", "dog"],
    )
    assert seven.masks["cat"].sum() == 20 * 22 and twelve.masks["dog"][10:, 8].sum() == 10


@pytest.mark.parametrize("protocol", evaluate_published.PROTOCOLS)
def test_a_folder_that_is_not_the_data_set_is_refused(protocol, tmp_path):
    with pytest.raises(FileNotFoundError, match="Pass the"):
        next(iter(evaluate_published.PROTOCOLS[protocol][0](tmp_path)))


# Whole protocols: maps that are known, then the command with a real pipeline


class Known(protocols.Maps):
    """Maps that are right: of each word where its class is, of "floor" everywhere a little."""

    def __init__(self, samples):
        super().__init__(None)
        self.truths = {sample.image.tobytes(): sample for sample in samples}

    def of(self, image, _prompt, words):
        sample = self.truths[image.tobytes()]
        kinds = {word: kind for kind, word in sample.words.items()}
        found = [sample.truth == kinds.get(word, 254) for word in words]
        return np.stack(
            [one + 0.1 * (word == "floor") for one, word in zip(found, words, strict=True)]
        )


def test_right_maps_are_right_under_each_protocol(tmp_path):
    for name, write in (("i", imagenet), ("v", voc)):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    samples = list(data.imagenet_seg(tmp_path / "i"))
    found = protocols.imagenet_seg(samples, Known(samples))
    assert found["images"] == 2
    assert {found[name] for name in ("accuracy", "mean IoU", "mAP")} == {1.0}
    samples = list(data.voc(tmp_path / "v"))
    single = protocols.voc_single(samples, Known(samples))
    assert (single["images"], single["IoU of the class"], single["mean IoU"]) == (1, 1.0, 1.0)
    multi = protocols.voc_multi(samples, Known(samples))
    assert multi["IoU by class"] == {"background": 1.0, "cat": 1.0, "dog": 1.0}


@pytest.mark.parametrize(
    ("protocol", "write"),
    [("imagenet-seg", imagenet), ("voc-single", voc), ("voc-multi", voc), ("coco-gen", daam)],
)
@pytest.mark.weekly
def test_the_command_measures_a_folder(protocol, write, tmp_path, capsys):
    make_pipeline().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    out = tmp_path / "found.json"
    few = ["--samples", "2", "--steps", "2", "--device", "cpu", "--out", str(out)]
    where = ["--data", str(tmp_path / "data"), "--model", str(tmp_path / "model")]
    evaluate_published.main(["--protocol", protocol, *where, *few])
    figures = json.loads(out.read_text())["figures"]
    assert figures["images"] == (1 if protocol == "voc-single" else 2)
    if protocol == "coco-gen":
        assert figures["IoU, unlabelled, above 0.4"] >= figures["IoU, labelled, above 0.4"]
        assert figures["IoU, unlabelled, above 0.4"] >= figures["IoU, assigned, above 0.4"]
    else:
        assert 0 <= figures["mean IoU"] < figures["accuracy"] < 1
    assert f"| {protocol}, {tmp_path / 'model'}, default |" in capsys.readouterr().out


@pytest.mark.parametrize("swapped", [False, True])
def test_drawn_words_are_scored_by_themselves_and_by_the_best_map(swapped, tmp_path, monkeypatch):
    daam(tmp_path)
    drawing = next(data.coco_gen(tmp_path))
    cat, dog = (torch.from_numpy(one).float() for one in drawing.masks.values())
    maps = torch.stack([dog, cat] if not swapped else [cat, dog], dim=-1)
    prompt = read_prompt(tiny_tokenizer(), drawing.prompt)
    columns = [prompt.find(word)[0][0] for word in ("dog", "cat")]
    heatmaps, seeds = Heatmaps(prompt, maps, columns), []

    def generate(_pipe, text, *, seed, **_ways):
        seeds.append((text, seed))
        return [SimpleNamespace(heatmaps=heatmaps)]

    monkeypatch.setattr("sdattn.generate", generate)
    found = protocols.coco_gen([drawing], protocols.Maps(None))
    assert seeds == [("a red dog and a cat", 3)]
    other = int((dog * cat).sum()) / int(((dog + cat) > 0).sum())
    assert found["IoU, labelled, above 0.4"] == pytest.approx(other if swapped else 1)
    assert found["IoU, unlabelled, above 0.4"] == found["IoU, assigned, above 0.4"] == 1


@pytest.mark.weekly
def test_maps_are_the_mean_over_the_papers_seeds():
    pipe, image = make_pipeline(), Image.fromarray(new_image(1, (64, 64)))
    found = protocols.Maps(pipe, 2, preset="sum").of(image, "a red cat", ["cat", "red"])
    height, width = default_size(pipe)
    square = image.resize((width, height), Image.Resampling.BICUBIC)
    runs = [explain(pipe, square, "a red cat", seed=seed, preset="sum")[0] for seed in (4, 5)]
    for i, word in enumerate(("cat", "red")):
        expected = (np.asarray(runs[0].heatmaps[word]) + np.asarray(runs[1].heatmaps[word])) / 2
        np.testing.assert_allclose(found[i], expected, rtol=1e-5)
