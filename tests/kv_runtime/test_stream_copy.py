"""The native copy past the caches against `numpy.copyto`."""

import numpy as np
import pytest

from sagellm._core import stream_copy

SMALL = 128 << 10  # from here on caches are passed by


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 4096, SMALL - 1, SMALL, SMALL + 1, SMALL + 64, 3 * SMALL + 77])
@pytest.mark.parametrize("shift", [0, 1, 15, 16, 63, 64])
@pytest.mark.parametrize("source_shift", [0, 5])
def test_copies_just_what_it_is_given(num_bytes: int, shift: int, source_shift: int):
    source = np.random.default_rng(num_bytes).integers(0, 256, num_bytes + 2 * 64, np.uint8)
    copied, plain = np.zeros((2, num_bytes + 3 * 64), np.uint8)
    wanted = source[source_shift : source_shift + num_bytes]
    stream_copy(copied[shift : shift + num_bytes], wanted)
    np.copyto(plain[shift : shift + num_bytes], wanted)
    assert np.array_equal(copied, plain)


def test_what_does_not_fit_is_refused():
    target, source = np.zeros(8, np.uint8), np.ones(8, np.uint8)
    with pytest.raises(ValueError, match="7 bytes do not fit 8"):
        stream_copy(target, source[:7])
    with pytest.raises(TypeError):
        stream_copy(target, source.astype(np.int64))
    with pytest.raises(TypeError):
        stream_copy(target[::2], source[::2])
    target.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        stream_copy(target, source)
    assert not target.any()
