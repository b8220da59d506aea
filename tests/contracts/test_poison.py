"""The fixture that poisons uninitialised memory works."""

from __future__ import annotations

import pytest
import torch

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
MAKERS = ("torch.empty(3, dtype=dtype)", "torch.empty_like(zeros)", "zeros.new_empty(3)")


def made(expression: str, dtype: torch.dtype, module: str) -> torch.Tensor:
    """The value of an expression as code of `module` sees it."""
    names = {"__name__": module, "torch": torch, "dtype": dtype, "zeros": torch.zeros(3, dtype=dtype)}
    result: torch.Tensor = eval(expression, names)  # noqa: S307 - the three literals above
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("expression", MAKERS)
def test_our_memory_is_poisoned(expression: str, dtype: torch.dtype) -> None:
    tensor = made(expression, dtype, "tamis.kernels.somewhere")
    assert tensor.shape == (3,)
    assert tensor.dtype == dtype
    if dtype.is_floating_point:
        assert tensor.isnan().all()
    else:
        assert tensor.bool().all()
        assert (tensor == tensor[0]).all()
