"""Columns of NetCDF-4 files have the values of netCDF4, with NaN where it masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.data import Dataset

pytestmark = pytest.mark.framework("netCDF4")

TYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"]


def _attributes(rng: Any, variable: Any, dtype: Any) -> None:  # noqa: C901
    """Set random attributes, some of which do not fit the variable's type."""
    top = 1.0 if dtype.kind == "f" else 1

    def fitting(count: int) -> Any:
        values = rng.integers(0, 100, count) * top
        if rng.random() < 0.2:
            # In unpacked units, or of another type: netCDF4 ignores what does not fit.
            return values + rng.choice([0.0, 0.25, 1e20])
        return values.astype(dtype)

    if rng.random() < 0.3:
        variable.missing_value = fitting(int(rng.integers(1, 4)))
    if rng.random() < 0.1:
        variable.missing_value = dtype.type(0)
    if dtype.kind == "f" and rng.random() < 0.1:
        variable.missing_value = dtype.type(np.nan)
    if rng.random() < 0.2:
        variable.valid_range = np.sort(fitting(2))
    if rng.random() < 0.1:
        variable.valid_range = fitting(3)
    for name in ("valid_min", "valid_max"):
        if rng.random() < 0.15:
            setattr(variable, name, fitting(1)[0])
    if dtype.kind == "i" and rng.random() < 0.2:
        variable._Unsigned = str(rng.choice(["true", "True", "false"]))
    number = rng.choice([np.float32, np.float64, np.int32])
    if rng.random() < 0.4:
        variable.scale_factor = number(rng.choice([0.01, 1, 2, -0.5]))
    if rng.random() < 0.3:
        variable.add_offset = number(rng.choice([0, 273.15, -3]))


def _write(path: Path, rng: Any) -> dict[str, int]:
    """Write three random variables; return the number of rows of each."""
    import netCDF4

    written = {}
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", None)
        file.createDimension("level", 2)
        length = int(rng.integers(1, 9))
        file.createVariable("full", "f8", ("time",), fill_value=np.nan)[:] = np.arange(
            length
        )
        for index in range(3):
            dtype = np.dtype(str(rng.choice(TYPES)))
            fill = rng.choice(["default", "none", "own"])
            options = {"default": None, "none": False}
            own = dtype.type(np.nan if dtype.kind == "f" and rng.random() < 0.3 else 7)
            group = file if rng.random() < 0.8 else file.createGroup("g")
            variable = group.createVariable(
                f"v{index}",
                dtype,
                ("time", "level")[: int(rng.integers(1, 3))],
                fill_value=options.get(str(fill), own),
                zlib=bool(rng.integers(0, 2)),
                endian=str(rng.choice(["little", "big"])),
            )
            variable.set_auto_maskandscale(False)
            _attributes(rng, variable, dtype)
            rows = length if rng.random() < 0.6 else int(rng.integers(0, length + 1))
            first = int(rng.integers(0, rows)) if rows and rng.random() < 0.2 else 0
            # Without a fill value, netCDF4 returns any bytes for unwritten rows.
            first = 0 if fill == "none" else first
            shape = (rows - first, *variable.shape[1:])
            values = rng.integers(0, 120, shape).astype(dtype)
            if values.size and rng.random() < 0.1:
                values.flat[0] = netCDF4.default_fillvals[dtype.str[1:]]
            variable[first:rows] = values
            written[f"v{index}"] = rows
    return written


@pytest.mark.filterwarnings("ignore")
@given(seed=st.integers(0, 10**9))
def test_values_of_random_variables_are_those_of_netcdf4(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    import netCDF4

    path = tmp_path_factory.getbasetemp() / "random.nc"
    written = _write(path, np.random.default_rng(seed))
    with netCDF4.Dataset(path) as file:
        for name, rows in written.items():
            inside = file if name in file.variables else file["g"]
            full_name = name if inside is file else f"g/{name}"
            try:
                masked = inside[name][:]
            except TypeError:
                continue  # netCDF4 fails for _Unsigned without _FillValue
            is_gone = np.ma.getmaskarray(masked)
            stage: Any = Dataset.from_files(path, ["full", full_name]).stage
            try:
                batch = stage.read(slice(0, file.dimensions["time"].size), 0)
            except ValueError as error:
                assert f"integers in {full_name} of {path}" in str(error)  # noqa: PT017
                assert inside[name].dtype.kind in "iu"
                assert is_gone.any()
                continue
            found = batch[name] if inside is file else batch["g"][name]
            if found.dtype.kind in "iu":
                np.testing.assert_array_equal(found, masked.data)
                # Without a fill value, bytes have no missing values.
                assert not is_gone.any() or found.dtype.itemsize == 1
                continue
            with np.errstate(all="ignore"):
                expected = masked.data.astype(found.dtype)
            expected[is_gone] = np.nan
            expected[rows:] = np.nan
            np.testing.assert_array_equal(found, expected)


def test_names_of_dimensions_coordinates_and_groups(tmp_path: Path) -> None:
    import netCDF4

    path = tmp_path / "names.nc"
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", None)
        file.createDimension("level", 3)
        # These are no coordinates, although they have the names of dimensions.
        file.createVariable("level", "f4", ("time",), zlib=True, fletcher32=True)[:] = [
            1,
            2,
        ]
        file.createVariable("lat", "f4", ("level",))[:] = [7, 8, 9]
        inside = file.createGroup("inside")
        inside.createVariable("q", "f4", ("time",))[:] = [3, 4]
        inside["q"].coordinates = "lon"
        inside.createVariable("lon", "f4", ("time",))[:] = [5, 6]
        inside.createVariable("short", "i4", ("time",))[:] = [5]
    (batch,) = Dataset.from_files(path).batch(2)
    assert sorted(batch) == ["inside", "level"]
    assert sorted(batch["inside"]) == ["q", "short"]
    assert batch["level"].tolist() == [1, 2]
    np.testing.assert_array_equal(batch["inside"]["short"], [5, np.nan])
    (lat,) = Dataset.from_files(path, "lat").batch(3)
    assert lat.tolist() == [7, 8, 9]
    # The dimension time has no values.
    with pytest.raises(ValueError, match=r"column time in .*names\.nc"):
        Dataset.from_files(path, ["time"])
    with pytest.raises(ValueError, match="found lat along level"):
        Dataset.from_files(path, ["level", "lat"])


def test_times_in_other_units_are_errors(tmp_path: Path) -> None:
    import netCDF4

    for month in (1, 2):
        with netCDF4.Dataset(tmp_path / f"{month}.nc", "w") as file:
            file.createDimension("time", None)
            time = file.createVariable("time", "f8", ("time",))
            time.units = f"hours since 2020-{month:02}-01"
            time[:] = [0, 1]
            file.createVariable("q", "f4", ("time",))[:] = [1, 2]
            packed = file.createVariable("packed", "i2", ("time",))
            packed[:] = [1, 2]
            packed.scale_factor = "0.1"
    paths = str(tmp_path / "*.nc")
    assert len(list(Dataset.from_files(paths, ["q"]))) == 4
    with pytest.raises(
        ValueError, match=r"time in 'hours since 2020-01-01' in .*2\.nc"
    ):
        Dataset.from_files(paths, ["q", "time"])
    assert len(list(Dataset.from_files(paths, ["q", "time"], decode=False))) == 4
    with pytest.raises(ValueError, match=r"scale_factor of packed of .*'0\.1'"):
        Dataset.from_files(paths)
