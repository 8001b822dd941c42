"""The normal distribution function, against Python's own erfc."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numpygpt import special
from numpygpt.special import normal_cdf, normal_pdf, tail_coefficients


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


@pytest.mark.parametrize(("degree", "off"), [(20, 1e-15), (10, 3e-9)])
def test_the_fit_is_as_good_as_is_said(degree, off):
    z = np.arange(0, 37, 1 / 64)  # of few bits, so that exp(z²/2) brings no error of its own
    t = (z - special.CENTRE) / (z + special.CENTRE)
    tail = np.exp(-0.5 * z * z) * np.polyval(tail_coefficients(degree), t)
    assert len(tail_coefficients(degree)) == degree + 1
    assert off / 10 < np.abs(tail - phi(-z)).max() < off


@pytest.mark.parametrize(("dtype", "degree"), [(np.float16, 10), (np.float32, 10), (np.float64, 20)])
def test_the_degree_is_no_higher_than_the_precision_needs(dtype, degree, monkeypatch):
    degrees = []
    monkeypatch.setattr(special, "tail_coefficients", lambda n: degrees.append(n) or tail_coefficients(n))
    normal_cdf(np.ones(1, dtype))
    assert degrees == [degree]


def test_huge_inputs_are_calm():
    for dtype in (np.float32, np.float64):
        x = np.array([-np.finfo(dtype).max, -1e30, -41, 41, 1e30, np.finfo(dtype).max], dtype)
        assert normal_cdf(x).tolist() == [0, 0, 0, 1, 1, 1] and not normal_pdf(x).any()
