"""The command ``hpcstrat bench input``: measures how fast a user's files are read."""

from __future__ import annotations

import click

from hpcstrat.data.files.rows import files_of
from hpcstrat.tools.bench.input_reading import Reading, advice, measure_reading
from hpcstrat.tools.terminal import add_row, new_console, new_table

__all__ = ["input_command"]


def _rate(reading: Reading) -> list[str]:
    ahead = f"{reading.ahead} batches" if reading.ahead else "no"
    return [
        reading.order,
        ahead,
        f"{reading.rows_per_second:,.0f}",
        f"{reading.bytes_per_second / 1e6:,.0f}",
        f"{reading.processor_ms_per_mb:.2f}",
    ]


@click.command("input", context_settings={"show_default": True})
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--columns",
    metavar="NAMES",
    help="Names or patterns of columns, separated by commas; default: all columns.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=256,
    help="Rows that are read at once.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01),
    default=3.0,
    help="Duration of each measurement.",
)
@click.option(
    "--cold",
    is_flag=True,
    help="Drop the files from the kernel's page cache before each measurement.",
)
def input_command(
    files: tuple[str, ...],
    columns: str | None,
    batch_size: int,
    seconds: float,
    cold: bool,
) -> None:
    """Measure how fast files are read in each order, and advise on how to read faster.

    \b
        hpcstrat bench input 'era5/*.nc' --columns t2m,u10
    """
    wanted = None if columns is None else [name.strip() for name in columns.split(",")]
    try:
        rows, raw, found = measure_reading(
            files_of(files),
            columns=wanted,
            batch_size=batch_size,
            seconds=seconds,
            is_cold=cold,
        )
    except (ImportError, OSError, ValueError) as error:
        click.echo(f"hpcstrat bench input: {error}", err=True)
        raise SystemExit(2) from error
    console = new_console()
    console.print(f"{rows.describe()}; plain reads: {raw / 1e6:,.0f} MB/s")
    for name, column in rows.columns().items():
        console.print(f"  {name or 'array'}: {column.how}")
    table = new_table("order", "read ahead", "rows/s", "MB/s", "processor ms/MB")
    for reading in found:
        add_row(table, *_rate(reading))
    console.print(table)
    said = advice(rows, found, batch_size)
    for sentence in said or ["found no way to read faster"]:
        console.print(f"- {sentence}")
