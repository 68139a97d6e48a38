"""Rows of files: HDF5, NetCDF-4, NumPy, Zarr and Parquet."""
