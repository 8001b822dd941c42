"""The normal distribution function, against Python's own erfc."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from numpygpt.special import normal_cdf, normal_pdf


def phi(x):
    return np.array([0.5 * math.erfc(-a / math.sqrt(2)) for a in x])


def test_the_cdf_is_erfc_to_1e15_and_in_the_tail_to_a_small_relative_error():
    x = np.linspace(-36, 36, 7201)
    np.testing.assert_allclose(normal_cdf(x), phi(x), rtol=0, atol=1e-15)
    few_bits = np.round(x[abs(x) < 20] * 128) / 128  # x² exact, so that exp(-x²/2) brings no error of its own
    np.testing.assert_allclose(normal_cdf(few_bits), phi(few_bits), rtol=1e-13)


@given(st.floats(-30, 8))
def test_the_cdf_is_symmetric_and_the_pdf_its_density(x):
    x = np.array([x])
    np.testing.assert_allclose(normal_cdf(x) + normal_cdf(-x), 1, rtol=0, atol=2e-15)
    np.testing.assert_allclose(normal_pdf(x), np.exp(-x * x / 2) / math.sqrt(2 * math.pi), rtol=1e-13)


def test_float32_stays_float32_and_is_good_to_its_rounding():
    x = np.linspace(-10, 10, 2001, dtype=np.float32)
    assert normal_cdf(x).dtype == normal_pdf(x).dtype == np.float32
    np.testing.assert_allclose(normal_cdf(x), phi(x.astype(float)), rtol=0, atol=2e-7)


def test_huge_inputs_are_calm():
    for dtype in (np.float32, np.float64):
        x = np.array([-np.finfo(dtype).max, -1e30, -41, 41, 1e30, np.finfo(dtype).max], dtype)
        assert normal_cdf(x).tolist() == [0, 0, 0, 1, 1, 1] and not normal_pdf(x).any()
