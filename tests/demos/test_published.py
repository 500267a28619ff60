"""Published protocols: scores against scikit-learn and by hand, folders of each data set's form."""

import json

import h5py
import numpy as np
import pytest
from helpers.tiny_pipelines import make_pipeline
from PIL import Image
from sklearn.metrics import accuracy_score, average_precision_score, confusion_matrix, jaccard_score

from demos.evaluation import evaluate_published
from demos.evaluation.published import data, protocols
from demos.evaluation.published.scores import (
    IGNORED,
    Confusion,
    ap_of_both,
)

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


def test_precision_is_that_of_scikit_learn_over_both_classes():
    truth, values = labels(2), RNG.random((12, 9)).round(1)  # with ties
    truth[0, :3] = IGNORED
    scaled = (values - values.min()) / (values.max() - values.min())
    known = truth != IGNORED
    both = np.stack([1 - scaled, scaled])[:, known].ravel()
    hot = np.stack([truth == 0, truth == 1])[:, known].ravel()
    assert ap_of_both(values, truth) == pytest.approx(average_precision_score(hot, both))


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
