"""Which module may import which: the architecture, held to by a test."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sdattn

PACKAGE = Path(sdattn.__file__).parent
MAY_IMPORT = {
    "attention.core": set(),
    "attention.processor": {"attention.core"},
    "attention.module": {"attention.core", "attention.processor"},
    "attention": {"attention.core", "attention.module", "attention.processor"},
    "layers": {"attention"},
    "guidance": set(),
    "words": set(),
    "terminal": set(),
    "tokenizing": {"words"},
    "tokens": {"tokenizing", "words"},
    "chunks": {"tokenizing", "tokens", "words"},
    "families": {"chunks", "tokenizing", "tokens", "words"},
    "prompts": {"families", "tokens"},
    "attachment": {"guidance", "layers", "maps", "processors"},
    "store": {"attachment", "layers", "maps", "selections"},
    "attended": set(),
    "sdpa": {"attended", "attention"},
    "witness": {"attended", "attention", "sdpa"},
    "processors": {"attended", "attention", "attention.processor", "sdpa", "witness"},
    "joint": {"attention", "layers", "processors", "sdpa"},
    "calls": {"layers", "processors"},
    "compiled": set(),
    "asking": {"attended", "layers", "processors"},
    "presets": set(),
    "render": set(),
    "alignment": {"tokens"},
    "blend": {"attention", "tokens"},
    "controllers": {"alignment", "blend", "store", "tokens"},
    "model_index": set(),
    "pipelines": {"guidance", "layers", "model_index", "prompts"},
    "finite": {"compiled"},
    "running": {"finite", "pipelines", "prompts"},
    "ddim": set(),
    "nulltext": {"ddim", "guidance"},
    "pictures": {"pipelines"},
    "inversion": {"ddim", "nulltext", "pictures", "pipelines", "prompts", "running"},
    "outlines": {"layers", "model_index", "pipelines"},
    "masks": set(),
    "scenes": set(),
    "scene_checker": {"masks", "scenes"},
    "selections": {"layers"},
    "maps": {"attended", "attention", "guidance", "layers", "selections"},
    "capture": {
        "asking",
        "attended",
        "calls",
        "compiled",
        "guidance",
        "joint",
        "layers",
        "maps",
        "processors",
        "selections",
    },
    "layermaps": {"layers", "maps", "presets", "selections"},
    "refinement": {"layermaps", "layers"},
    "aggregation": {"layermaps", "maps", "presets", "refinement"},
    "folded": {
        "attention",
        "guidance",
        "layermaps",
        "layers",
        "maps",
        "presets",
        "refinement",
        "selections",
        "store",
    },
    "control": {
        "attachment",
        "attention",
        "attention.processor",
        "layers",
        "maps",
        "processors",
        "store",
    },
    "removal": {
        "attention",
        "calls",
        "compiled",
        "controllers",
        "guidance",
        "layers",
        "maps",
        "processors",
    },
    "watching": {"layers", "pipelines", "presets", "refinement", "selections", "tokens"},
    "heatmap": {"layermaps", "masks", "render"},
    "notebook": {"render"},
    "heatmaps": {
        "aggregation",
        "chunks",
        "folded",
        "heatmap",
        "layermaps",
        "maps",
        "masks",
        "notebook",
        "presets",
        "prompts",
        "store",
        "tokens",
    },
    "details": {"heatmaps", "layermaps", "layers", "maps", "selections"},
    "imagerun": {"details", "heatmap", "heatmaps", "layermaps"},
    "report.pages": set(),
    "report.command": {"imagerun", "presets"},
    "views": {"aggregation", "heatmaps", "imagerun", "layermaps", "presets", "tokens"},
    "report.maps": {"heatmap", "heatmaps", "imagerun", "views"},
    "report": {
        "heatmap",
        "imagerun",
        "presets",
        "render",
        "report.command",
        "report.maps",
        "report.pages",
        "scenes",
        "tokens",
        "views",
    },
    "packing": {"heatmap", "imagerun", "layermaps", "render", "report"},
    "runinfo": {"packing", "presets"},
    "unpacking": {
        "aggregation",
        "details",
        "heatmap",
        "heatmaps",
        "imagerun",
        "layermaps",
        "packing",
        "presets",
        "runinfo",
        "tokens",
    },
    "targets": {"packing"},
    "files": {"imagerun", "packing", "runinfo", "targets", "unpacking"},
    "differences": {"heatmap", "heatmaps", "words"},
    "causes": {
        "controllers",
        "heatmap",
        "layers",
        "pipelines",
        "prompts",
        "removal",
        "running",
        "tokens",
        "watching",
    },
    "runs": {
        "details",
        "files",
        "heatmap",
        "heatmaps",
        "imagerun",
        "layermaps",
        "maps",
        "notebook",
        "report",
    },
    "sides": {"files", "heatmaps", "packing", "presets", "runs"},
    "comparison": {"differences", "files", "packing", "render", "sides"},
    "sampling": {
        "asking",
        "capture",
        "finite",
        "heatmaps",
        "layermaps",
        "maps",
        "pipelines",
        "presets",
        "prompts",
        "refinement",
        "running",
        "runs",
        "tokens",
        "watching",
    },
    "explaining": {
        "ddim",
        "inversion",
        "pictures",
        "pipelines",
        "presets",
        "prompts",
        "running",
        "runs",
        "sampling",
        "selections",
        "tokens",
        "watching",
    },
    "edit": {
        "alignment",
        "attention",
        "blend",
        "control",
        "controllers",
        "files",
        "inversion",
        "pipelines",
        "prompts",
        "render",
        "running",
        "runs",
        "sampling",
        "tokens",
    },
    "generation": {
        "causes",
        "heatmap",
        "pipelines",
        "presets",
        "prompts",
        "running",
        "runs",
        "sampling",
        "scenes",
        "watching",
    },
    "batch.lines": set(),
    "batch.items": {"batch.lines", "running", "words"},
    "batch.plan": {"batch.items", "packing", "pipelines", "prompts", "running"},
    "batch.sizing": {"batch.plan", "pipelines", "presets", "prompts", "sampling"},
    "batch.team": {"pipelines"},
    "batch.locks": set(),
    "batch.layouts": {"files", "packing"},
    "batch.rows": set(),
    "batch.checking": {"batch.layouts", "batch.rows", "packing", "runinfo", "unpacking"},
    "batch.adopting": {"batch.checking", "batch.folder", "batch.layouts", "batch.rows"},
    "batch.folder": {
        "batch.layouts",
        "batch.locks",
        "batch.rows",
        "files",
        "packing",
        "runinfo",
    },
    "batch.request": {"packing", "presets"},
    "batch.claims": {
        "batch.adopting",
        "batch.folder",
        "batch.plan",
        "batch.request",
        "batch.rows",
        "packing",
    },
    "batch.progress": set(),
    "batch.writing": set(),
    "batch.signals": {"batch.request"},
    "batch.drawing": {
        "batch.folder",
        "batch.items",
        "batch.plan",
        "batch.progress",
        "batch.sizing",
        "batch.writing",
        "heatmaps",
        "imagerun",
        "layermaps",
        "packing",
        "presets",
        "prompts",
        "runs",
        "sampling",
        "watching",
    },
    "batch.gallery": {"batch.folder", "batch.rows", "report.pages"},
    "batch.engine": {
        "batch.claims",
        "batch.drawing",
        "batch.folder",
        "batch.gallery",
        "batch.items",
        "batch.plan",
        "batch.progress",
        "batch.request",
        "batch.signals",
        "batch.sizing",
        "batch.team",
        "batch.writing",
        "outlines",
        "pipelines",
        "terminal",
        "watching",
    },
    "batch.reading": {"batch.checking", "batch.folder", "batch.rows", "files", "unpacking"},
    "batch.merging": {"files", "batch.folder", "batch.gallery", "batch.plan", "batch.rows"},
    "batch": {"batch.engine", "batch.merging", "batch.reading"},
    "cli.options": {"presets"},
    "cli.batches": {"batch.engine", "batch.merging", "batch.reading", "cli.options", "terminal"},
    "cli.comparisons": {"batch.reading", "cli.printing", "comparison", "files"},
    "cli.printing": {"terminal"},
    "cli.runs": {
        "cli.options",
        "cli.printing",
        "files",
        "generation",
        "layers",
        "pipelines",
        "prompts",
        "running",
        "runs",
        "selections",
    },
    "cli.pictures": {"cli.options", "cli.printing", "explaining", "files", "pipelines"},
    "cli.edits": {"cli.options", "cli.printing", "edit", "files", "pipelines"},
    "app": {"generation", "layers", "notebook", "pipelines", "presets", "report"},
    "cli.live": {"app", "cli.options", "pipelines"},
    "figures.lettering": set(),
    "figures.placing": {"figures.lettering"},
    "figures.choosing": {
        "figures.lettering",
        "figures.placing",
        "heatmap",
        "heatmaps",
        "imagerun",
        "views",
    },
    "figures.saving": {"files"},
    "figures.animation": {"figures.choosing", "figures.saving", "imagerun", "render"},
    "figures.panels": {"figures.lettering", "figures.placing", "render"},
    "figures": {
        "figures.choosing",
        "figures.lettering",
        "figures.panels",
        "figures.placing",
        "figures.saving",
        "heatmaps",
        "imagerun",
        "presets",
        "views",
    },
    "cli.shows": {
        "batch.reading",
        "cli.printing",
        "figures",
        "figures.animation",
        "files",
        "packing",
        "report",
    },
    "cli": {
        "cli.batches",
        "cli.comparisons",
        "cli.edits",
        "cli.live",
        "cli.pictures",
        "cli.runs",
        "cli.shows",
        "terminal",
    },
}
MODULES = {  # "runs" is runs.py, "cli" is cli/__init__.py, "cli.runs" is cli/runs.py
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in [*PACKAGE.glob("[!_]*.py"), *PACKAGE.glob("*/**/*.py")]
}
HEAVY = {"diffusers", "transformers", "matplotlib", "accelerate"}


def imports(module, top_level_only=False):
    path = MODULES[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            folders = path.relative_to(PACKAGE).parts[: -node.level]
            base = ".".join([*folders, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            yield from (name if name in MAY_IMPORT else base for name in names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


def test_every_module_has_its_row():
    assert set(MODULES) == set(MAY_IMPORT)


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_modules_import_only_what_lies_below(module):
    ours = set(MAY_IMPORT) & set(imports(module))
    assert ours <= MAY_IMPORT[module]


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_heavy_packages_are_loaded_only_where_they_are_used(module):
    assert not HEAVY & set(imports(module, top_level_only=True))


@pytest.mark.parametrize(
    "module",
    [
        "attention",
        "attention.core",
        "attention.module",
        "attention.processor",
        "tokens",
        "words",
        "tokenizing",
        "processors",
    ],
)
def test_modules_that_stand_alone(module):
    allowed = {"torch"} if module.startswith(("attention", "processors")) else set()
    foreign = set(imports(module)) & ({"torch", "numpy", "PIL"} | HEAVY)
    assert foreign <= allowed


def test_the_import_is_light():
    code = (
        "import sys, torch; before = set(sys.modules); import sdattn; "
        "heavy = 'diffusers', 'transformers', 'matplotlib', 'PIL', 'torch._dynamo', 'sympy'; "
        "print([m for m in heavy if m in sys.modules and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
