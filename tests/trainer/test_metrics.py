"""The mismatch report against NumPy, and how it merges."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.metrics import Report


def reported(new: np.ndarray, old: np.ndarray, trained: np.ndarray, splits: int = 1) -> dict[str, float]:
    report = Report(len(new))
    for part in np.array_split(np.arange(len(new)), splits):
        tensors = [torch.tensor(values[part]) for values in (new, old, trained)]
        report.add(torch.zeros(len(part)), *tensors)  # pyright: ignore[reportArgumentType]
    return report.metrics()


@given(seed=st.integers(0, 2**31), n=st.integers(1, 700), splits=st.integers(1, 5), spread=st.floats(0.01, 3.0))
@settings(max_examples=60, deadline=None)
def test_every_number_is_that_of_numpy_over_trained_positions_without_sentinels(
    seed: int, n: int, splits: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    new = rng.uniform(-5, 0, n).astype(np.float32)
    old = (new + spread * rng.normal(size=n)).astype(np.float32)
    trained = rng.random(n) > 0.3
    trained[0] = True
    old[1:][rng.random(n - 1) > 0.9] = -9999.0

    found = reported(new, old, trained, splits)

    used = trained & (old > -9999)
    d = new[used].astype(np.float64) - old[used]
    r = np.exp(d)
    expected = {
        "loss:sum": 0.0,
        "tokens:sum": n,
        "loss_tokens:sum": trained.sum(),
        "mismatch_tokens:sum": len(d),
        "mismatch_sentinels:sum": (trained & (old <= -9999)).sum(),
        "mismatch:mean": d.mean(),
        "mismatch_k1:mean": -d.mean(),
        "mismatch_k2:mean": (d**2 / 2).mean(),
        "mismatch_k3:mean": (r - 1 - d).mean(),
        "mismatch_abs:mean": np.abs(d).mean(),
        "mismatch_abs_p99:max": np.quantile(np.abs(d), 0.99, method="inverted_cdf"),
        "mismatch_abs_max:max": np.abs(d).max(),
        "ratio_outside_0.9_1.1:mean": ((r < 0.9) | (r > 1.1)).mean(),
        "ratio_outside_0.5_2:mean": ((r < 0.5) | (r > 2)).mean(),
        "effective_sample_size:mean": r.sum() ** 2 / (len(d) * (r**2).sum()),
        "ratio_max:max": r.max(),
        "kl_sample_train_v1:mean": -d.mean(),
        "kl_sample_train_v2:mean": (d**2 / 2).mean(),
        "mismatch:sum": d.sum(),
        "mismatch_k2:sum": (d**2 / 2).sum(),
        "mismatch_k3:sum": (r - 1 - d).sum(),
        "mismatch_abs:sum": np.abs(d).sum(),
        "ratio_outside_0.9_1.1:sum": ((r < 0.9) | (r > 1.1)).sum(),
        "ratio_outside_0.5_2:sum": ((r < 0.5) | (r > 2)).sum(),
        "ratio:sum": r.sum(),
        "ratio_squared:sum": (r**2).sum(),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-6, abs=1e-9), name
        assert name.count(":") == 1


def test_the_sums_of_chunks_give_the_numbers_of_the_whole() -> None:
    rng = np.random.default_rng(1)
    new, old = rng.uniform(-5, 0, (2, 50)).astype(np.float32)
    trained = rng.random(50) > 0.4

    whole = reported(new, old, trained)
    chunks = [reported(new[part], old[part], trained[part]) for part in (slice(0, 11), slice(11, 50))]

    merged = {name: sum(chunk[name] for chunk in chunks) for name in whole if name.endswith(":sum")}
    n = merged["mismatch_tokens:sum"]
    assert merged == pytest.approx({name: whole[name] for name in merged})
    assert merged["mismatch_k3:sum"] / n == pytest.approx(whole["mismatch_k3:mean"])
    size = merged["ratio:sum"] ** 2 / (n * merged["ratio_squared:sum"])
    assert size == pytest.approx(whole["effective_sample_size:mean"])
    assert max(chunk["mismatch_abs_max:max"] for chunk in chunks) == whole["mismatch_abs_max:max"]


def test_a_mismatch_beyond_every_measure_stays_finite() -> None:
    new, old = np.array([-1.0, -2000.0], np.float32), np.array([-3000.0, -1.0], np.float32)

    found = reported(new, old, np.array([True, True]))

    assert all(math.isfinite(value) for value in found.values())
    assert found["mismatch_abs_max:max"] == 2999


def test_an_operation_of_sentinels_alone_reports_their_count_and_no_mean() -> None:
    found = reported(np.zeros(3, np.float32), np.full(3, -9999.0, np.float32), np.array([True, True, False]))

    assert (found["mismatch_sentinels:sum"], found["mismatch_tokens:sum"]) == (2, 0)
    assert not any(name.endswith((":mean", ":max")) for name in found)


def test_the_reference_kl_is_reported_where_it_is_known() -> None:
    report = Report(3)
    report.add_reference(
        torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, math.nan, -1.0]), torch.tensor([1.0, 1.0, 0.0])
    )

    found = report.metrics()

    assert found["kl_ref:mean"] == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    assert found["kl_ref_tokens:sum"] == 1
