"""What is refused: each kind is of sdattn and of the builtin it is like, and goes everywhere."""

import ast
import builtins
import copy
import importlib
import inspect
import pickle
import re
from pathlib import Path

import pytest

import sdattn
from sdattn import errors
from sdattn.errors import OptionError, SdattnError, refuse
from sdattn.files.records import RecordError

PACKAGE = Path(sdattn.__file__).parent
KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, SdattnError) and kind is not SdattnError
]
LIKE = {
    "InvalidValueError": ValueError,
    "OptionError": ValueError,
    "NotInCallError": AttributeError,
    "InvalidTypeError": TypeError,
    "NotFoundError": KeyError,
    "RunError": RuntimeError,
    "CaptureError": RuntimeError,
    "NotFiniteError": ValueError,
    "AccessError": OSError,
    "ExistsError": FileExistsError,
    "MissingFileError": FileNotFoundError,
    "DeniedError": PermissionError,
    "IsFolderError": IsADirectoryError,
    "MissingPackageError": ImportError,
}
# What is raised in the package and is no refusal: by whom it is caught, or that nobody should.
OTHERS = {
    ("__init__.py", "AttributeError"),  # of __getattr__, as Python asks for
    ("models/__init__.py", "AttributeError"),
    ("attention/controlled.py", "NotImplementedError"),  # a method of subclasses
    ("control/controllers.py", "NotImplementedError"),  # likewise
    ("maps/folded.py", "NotImplementedError"),  # likewise
}


def made(kind):
    return kind("size", 3, "see `folder`.") if kind is OptionError else kind("a {b}, see `folder`.")


def test_every_kind_is_known_here_with_the_builtin_that_it_is_like():
    assert {kind.__name__ for kind in KINDS} == LIKE.keys()


@pytest.mark.parametrize("kind", [*KINDS, RecordError, SdattnError])
@pytest.mark.parametrize("text", ["plain {x}: 'a' and \"b\"\n", ""])
def test_each_kind_prints_its_plain_text_and_is_caught_as_the_builtin(kind, text):
    error = kind("size", 3, text) if kind is OptionError else kind(text)
    assert str(error) == (f"`size=3`: {text}" if kind is OptionError else text)
    assert isinstance(error, SdattnError)
    assert isinstance(error, LIKE.get(kind.__name__, SdattnError))


@pytest.mark.parametrize("kind", [*KINDS, RecordError])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_each_kind_goes_to_another_process(kind, protocol):
    error = made(kind)
    error.noted = "by the way"
    copies = copy.copy(error), copy.deepcopy(error)
    for twin in (pickle.loads(pickle.dumps(error, protocol)), *copies):
        assert type(twin) is kind and str(twin) == str(error) and twin.args == error.args
        assert vars(twin) == vars(error)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_goes_through_ray(kind):
    ray = pytest.importorskip("ray")
    twin = ray.cloudpickle.loads(ray.cloudpickle.dumps(made(kind)))
    as_a_tasks = ray.exceptions.RayTaskError("draw", "Traceback: ...", made(kind))
    cause = as_a_tasks.as_instanceof_cause()
    assert str(twin) == str(made(kind)) == str(cause.cause)
    assert isinstance(cause, LIKE[kind.__name__])


def test_what_cannot_be_pickled_goes_as_python_shows_it():
    error = OptionError("mode", lambda: 0, "pass a text.")
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error) and "<lambda>" in twin.value


@pytest.mark.parametrize(
    ("value", "known", "advice"),
    [
        (-1, "a whole number from 0", "pass a whole number from 0."),
        ("b", ["a"], "pass 'a'."),
        ("b", ("auto", None), "pass 'auto' or None."),
        (3, range(1, 3), "pass 1 or 2."),
        ("autos", {"auto": 1, "none": 2}, "pass 'auto' or 'none'. Did you mean 'auto'?"),
    ],
)
def test_a_refusal_says_what_is_known(value, known, advice):
    error = refuse("guidance", value, known)
    assert (error.option, error.value, error.advice) == ("guidance", value, advice)


def nodes_of(path):
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def is_builtin_error(name):
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException) and not (
        issubclass(kind, Warning)
    )  # fmt: skip


@pytest.mark.slow
def test_every_refusal_is_one_of_sdattns():
    """No builtin exception is made or raised in the package, but those of the list."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                node = node.func
            elif isinstance(node, ast.Raise):
                node = node.exc
            else:
                continue
            if isinstance(node, ast.Name) and is_builtin_error(node.id):
                found.add((path.relative_to(PACKAGE).as_posix(), node.id))
    assert found == OTHERS


@pytest.mark.slow
def test_every_warning_is_one_of_sdattns():
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warn", "warnings.warn"):
                named = [arg.id for arg in node.args[1:] if isinstance(arg, ast.Name)]
                assert named and named[0].endswith("Warning"), f"{path}:{node.lineno}"
                assert not hasattr(builtins, named[0]), f"{path}:{node.lineno}"


FAMILY = "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}"
TYPED = {
    "a family": FAMILY,
    "a heart": "\u2764\ufe0f",
    "a flag": "\N{WAVING BLACK FLAG}\U000e0067\U000e0062\U000e0065\U000e007f",
    "an emoji newer than Python": "\U0001fae9",
    "Persian": "می\u200cخواهم",  # noqa: RUF001
    "typed backslashes": r"\u200d \\u200d \U0001fae9",
    "both": "\\" + FAMILY + "\\\\" + FAMILY,
}
HIDDEN = ("\ufeffcat", "\u200bcat", "\u202ecat", "\x1b[2Jcat", "\ud83dcat", "\u3000cat")


@pytest.mark.parametrize("name", TYPED)
def test_messages_have_emoji_and_words_as_they_were_typed(name):
    text = TYPED[name]
    expected = "'" + text.replace("\\", "\\\\") + "'"  # as repr() writes backslashes
    with pytest.warns(errors.SdattnWarning) as told:
        errors.warn(f"{text!r} is unknown.", errors.SdattnWarning)
    assert str(told[0].message) == f"{expected} is unknown."
    assert str(errors.NotFoundError(f"{text!r} is unknown.")) == f"{expected} is unknown."
    assert str(refuse("word", text, "another")) == f"`word={expected}`: pass another."
    back = pickle.loads(pickle.dumps(refuse("word", text, "another")))
    assert str(back) == f"`word={expected}`: pass another."


@pytest.mark.parametrize("text", HIDDEN, ids=ascii)
def test_what_nobody_would_see_stays_escaped(text):
    told = str(errors.NotFoundError(f"{text!r} is unknown."))
    assert told == f"{text!r} is unknown." and "\\" in told


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("edit", "sdattn.edit_image(pipe, source, target)"),
        ("batch", "sdattn.batch.run_batch(request)"),
        ("figures", "sdattn.figures.figure(run, kind)"),
    ],
)
def test_a_module_that_is_called_names_the_function(name, meant):
    module = importlib.import_module(f"sdattn.{name}")
    assert inspect.ismodule(module)
    with pytest.raises(TypeError, match=re.escape(f"`sdattn.{name}` is a module. Call `{meant}`")):
        module("demo", "a cat", seed=0)
    path, _, _ = meant.partition("(")
    found = sdattn
    for part in path.split(".")[1:]:
        found = getattr(found, part)
    inspect.signature(found).bind(*meant.partition("(")[2].rstrip(")").split(", "))
