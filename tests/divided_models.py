"""Whether the installed Transformers and PyTorch divide models among ranks."""

import pytest

from mtrl.distributed.meshes import ModelParallel
from mtrl.distributed.plans import check_version
from mtrl.errors import UserError


def not_divided():
    """Return why the installed versions do not divide models; empty if they do."""
    try:
        check_version(ModelParallel(tensor=2))
    except UserError as error:
        return str(error)
    return ""


CAN_DIVIDE = pytest.mark.skipif(bool(not_divided()), reason=not_divided())
