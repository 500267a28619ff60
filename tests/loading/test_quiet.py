"""What is printed while a pipeline is loaded."""

import logging
import subprocess
import sys

import pytest

from sdattn.loading.quiet import no_notices


@pytest.mark.slow
def test_loading_prints_no_notice_of_torchvision():
    code = (
        "import sdattn; sdattn.load_pipeline('demo', device='cpu'); "
        "from transformers.utils import import_utils; import_utils.logger.warning('printed after')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torchvision" not in done.stderr and "printed after" in done.stderr
    assert done.stdout == ""


def test_all_but_the_notices_of_torchvision_is_printed(caplog):
    logger = logging.getLogger("transformers.utils.import_utils")
    notice = "`%sImageProcessor` requires torchvision (not installed); falling back to another"
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, logger.name)  # whatever other tests have set
    try:
        with pytest.raises(KeyError), no_notices():
            logger.warning(notice, "CLIP")
            logger.warning("torchvision is old")
            raise KeyError
        logger.warning(notice, "Siglip")
    finally:
        logger.removeHandler(caplog.handler)
    said = dict.fromkeys(record.getMessage() for record in caplog.records)
    assert [*said] == ["torchvision is old", notice % "Siglip"]
