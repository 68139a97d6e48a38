"""The table of faults: original source text, its replacement, tests that find it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: ``old`` is a source text that occurs once in the library.

    ``tests`` are test files that should find the fault: ``3:reductions`` is
    tests/mpi/ranks/engine/calls/check_reductions.py on 3 ranks.
    """

    name: str
    old: str
    new: str
    tests: str


def _m(name: str, tests: str, old: str, new: str) -> Mutant:
    return Mutant(name, old, new, tests)


MUTANTS = (
    # Sums: algorithms, packing, shared memory.
    _m(
        "by MPI: a mean is not divided",
        "3:reductions",
        """    yield comm.Iallreduce(values, total, op)
    divide(total, divisor)
""",
        "    yield comm.Iallreduce(values, total, op)\n",
    ),
    _m(
        "between ranks: the sums of several arrays are not copied out",
        "3:reductions",
        """    yield from sum_over(total, total, comm, work.divisor, work.function)
    drain(run, work.results, total)
""",
        "    yield from sum_over(total, total, comm, work.divisor, work.function)\n",
    ),
    _m(
        "repeated: a plan is repeated for arrays of another type",
        "2:repeats",
        "kinds = [(array.dtype, array.shape) for array in arrays]\n",
        "kinds = [array.shape for array in arrays]\n",
    ),
    _m(
        "repeated: results are written over values that are still to be read",
        "2:arrays",
        """                arrays = copied_where_overwritten(arrays, outs)
            plan.run""",
        "                pass\n            plan.run",
    ),
    _m(
        "areas: sums are written on one rank alone",
        "3:areas",
        """            if rank != me:
                part[...] = total""",
        "            pass",
    ),
    _m(
        "areas: memory that is gone is an area yet",
        "3:areas",
        "area.nbytes < array.nbytes or not area.lives()",
        "area.nbytes < array.nbytes",
    ),
    _m(
        "areas: the memory of another process is taken",
        "3:areas",
        "if (file.st_dev, file.st_ino) != (row[_DEVICE], row[_INODE]):",
        "if file.st_size < row[_NBYTES]:",
    ),
    _m(
        "areas: a rank without one is not seen",
        "3:areas",
        "shared = bool((states != _NONE).all())",
        "shared = bool((states != _NONE).any())",
    ),
    _m(
        "mean: three replicas are taken for a power of two",
        "3:all_reduce",
        "divisor & (divisor - 1)",
        "divisor & (divisor - 1) > 2",
    ),
    _m(
        "shared: the second rank's values are left out",
        "3:reductions",
        "for term in first[1:]:\n        call",
        "for term in first[2:]:\n        call",
    ),
    _m(
        "shared: a piece is laid over the one before, which others read",
        "3:all_reduce",
        """            after = places.take(place_bytes)
            _lay_out(following, after, work, places, me)
        own, flows""",
        """            after = place
            _lay_out(following, after, work, places, me)
        own, flows""",
    ),
    _m(
        "shared: results are taken out before the others have added theirs",
        "3:all_reduce",
        """        yield channel.step(work.call)
        for done, its_place""",
        """        for done, its_place""",
    ),
    _m(
        "shared: segments leave out the last lines",
        "3:all_reduce",
        "length = -(-size // (of * line)) * line",
        "length = size // (of * line) * line",
    ),
    _m(
        "shared: a place begins past the ring's end",
        "3:all_reduce",
        "if start >= self.ring_bytes:",
        "if start > self.ring_bytes:",
    ),
    _m(
        "shared: views of a place are those of another run of its length",
        "2:all_reduce",
        "key = run.dtype, place, run.start, run.size",
        "key = run.dtype, place, run.size",
    ),
    _m(
        "between workers: the own part is added twice",
        "3:all_reduce",
        "terms = [values[spans[me]] if rank == me else came[rank] for",
        "terms = [came[rank] if rank > 1 and rank != me else values[spans[me]] for",
    ),
    _m(
        "between workers: the third worker's sum is left out",
        "3:all_reduce",
        "add_in_order(terms, own, terms[1 if me == 0 else 0], function)",
        "add_in_order(terms[:2], own, terms[1 if me == 0 else 0], function)",
    ),
    _m(
        "halves: the scale of a message is not taken back",
        "3:all_reduce",
        "call_without_fp_warnings(np.ldexp, values, -exponent)",
        "call_without_fp_warnings(np.ldexp, values, exponent)",
    ),
    _m(
        "to one: the sum lies where the next values are received",
        "3:gather_broadcast",
        "total = next(parts).copy()",
        "total = next(parts)",
    ),
    _m(
        "packing: single elements of an array are left out",
        "3:reductions",
        "first, last = max(low, start), min(high, end)\n        if first < last:\n"
        "            index = bucket",
        "first, last = max(low, start), min(high, end)\n        if first < last - 1:\n"
        "            index = bucket",
    ),
    _m(
        "packing: half types are added in their own type",
        "2:reductions",
        """    if dtype.itemsize == 2 and is_half(dtype):
        return np.dtype(np.float32), True
    if dtype.kind in "iu" and means:""",
        '    if dtype.kind in "iu" and means:',
    ),
    _m(
        "packing: the mean of unsigned integers is of integers",
        "2:reductions",
        'if dtype.kind in "iu" and means:',
        'if dtype.kind == "i" and means:',
    ),
    # The order of additions.
    _m(
        "order: parts are added in another order",
        "3:part_reductions",
        "add_in_order(terms, total, scratch, function)",
        "add_in_order(terms[::-1], total, scratch, function)",
    ),
    _m(
        "order: segments in shared memory are added in another order",
        "3:shared_memory",
        "add_in_order(terms, terms[me], scratch, function)",
        "add_in_order(terms[::-1], terms[me], scratch, function)",
    ),
    _m(
        "order: exchanged parts are added in another order",
        "3:exchanged",
        "terms = [values[spans[me]] if rank == me else came[rank] for rank in "
        "range(size)]",
        "terms = [values[spans[me]], *came.values()]",
    ),
    _m(
        "order: the workers' values in headers are added in another order",
        "3:header_sum",
        "add_in_order(terms, total, function=self._function)",
        "add_in_order(terms[::-1], total, function=self._function)",
    ),
    _m(
        "order: one replica adds the values of all in another order",
        "3:reduce_to_one",
        "    for source in range(comm.size):\n        if source != root:",
        "    for source in reversed(range(comm.size)):\n        if source != root:",
    ),
    _m(
        "order: slices are added in another order",
        "3:slices",
        "add_in_order(terms, total)\n            if topology",
        "add_in_order(terms[::-1], total)\n            if topology",
    ),
    _m(
        "order: mapped arrays are added in another order",
        "3:areas",
        "add_in_order(terms, total, scratch)\n        divide",
        "add_in_order(terms[::-1], total, scratch)\n        divide",
    ),
    # MAX and MIN.
    _m(
        "extremes: NaN is less than other numbers",
        "3:extremes",
        "    bits[nans] = ones\n",
        "    bits[nans] = 0\n",
    ),
    _m(
        "extremes: keys are added between ranks",
        "3:extremes",
        "return np.add if op.adds else np.maximum",
        "return np.add",
    ),
    # Gathers, broadcasts, objects.
    _m(
        "gather: parts come in the wrong order",
        "3:gather_broadcast",
        "Block(rank, i, offset, before[i] * inner[i], *shape)",
        "Block(rank, i, offset, (wholes[i] - before[i] - length) * inner[i], *shape)",
    ),
    _m(
        "gather: changed lengths are not noticed",
        "3:gather_broadcast",
        "return replace(self, digest=self.digest ^ mark, lengths=mark)",
        "return replace(self, lengths=mark)",
    ),
    _m(
        "broadcast: always from replica 0",
        "3:gather_broadcast",
        "lengths = [sizes if r == root else",
        "lengths = [sizes if r == 0 else",
    ),
    _m(
        "objects: the next one is expected in the second row",
        "3:gather_broadcast",
        "left = left[-(-(_SIZE_BYTES + size) // _ROW_BYTES) * _ROW_BYTES :]",
        "left = left[_ROW_BYTES:]",
    ),
    _m(
        "moves: the part for another rank is taken",
        "3:moves",
        "return int(ends[source, (to - source - 1) % size])",
        "return int(ends[source, (to - source) % size])",
    ),
    _m(
        "moves: a rank's own part of an exchange is not in its results",
        "3:moves",
        "memory[comm.rank][...] = own\n",
        "pass\n",
    ),
    # Headers between workers, and values in headers.
    _m(
        "wire: who finds another header does not tell those after it",
        "4:inlined",
        "self._header[:] = _DIFFERENT\n",
        "pass\n",
    ),
    _m(
        "wire: what follows another header is left for the next one",
        "tests/unit/engine/algorithms/test_any_order.py",
        "nbytes = self._size_from(hop, header)\n",
        "nbytes = 0\n",
    ),
    _m(
        "concurrent sums: a sum begins a step before the one that was begun before it",
        "tests/unit/engine/algorithms/test_any_order.py",
        "if before is not None and flow.num_begun >= before.num_begun:",
        "if False:",
    ),
    _m(
        "wire: ranks of a worker that come between two looks are others",
        "3:inlined 4:inlined",
        "self._same = self._same and segment.agreed()",
        "self._same = False",
    ),
    _m(
        "inlined: what has come is not sent on",
        "4:inlined",
        "                (sent[1 << hop :][:later], came[:later]),\n",
        "",
    ),
    _m(
        "inlined: a sum replaces values that are to be added once more",
        "4:inlined",
        "if self._same and load is not None and finishes:",
        "if self._same and load is not None:",
    ),
    # Failures of one rank.
    _m(
        "agreement: a problem of rank 0 is not told",
        "tests/gpu/test_ranks_on_gpu.py::test_transport_tests_pass[2-check_results]",
        "comm.rank if problem else -1",
        "comm.rank or -1 if problem else -1",
    ),
    _m(
        "breaks: who left a call earlier is not found",
        "3:breaks",
        "return left < call\n",
        "return False\n",
    ),
    _m(
        "started: the error of making the call ready is not told",
        "3:all_reduce",
        "channel.post(call, run, 0 if failed is None else FAILED, carried)",
        "channel.post(call, run, 0, carried)",
    ),
    _m(
        "started: the thread that drives started calls is not woken",
        "3:all_reduce",
        "            self._started.set()\n\n    def progress",
        "            pass\n\n    def progress",
    ),
    _m(
        "dealing: the error of one replica's part is kept to itself",
        "3:data_failures 3:data_workers",
        """        with collectives.all_raise(_NEXT):
            found: Tree =""",
        """        if True:
            found: Tree =""",
    ),
    _m(
        "watchdog: nobody asks where the others are",
        "tests/mpi/test_watchdog.py",
        "return not self.others_inquire(self.topology.worker_comm.rank)",
        "return False",
    ),
    # Variables and values.
    _m(
        "variables: the mean of values or parts is their sum",
        "2:variables",
        "    op = ReduceOp.MEAN\n",
        "    op = ReduceOp.SUM\n",
    ),
    _m(
        "shares of an integer: the remainder goes to the wrong replicas",
        "2:variables",
        "remainder = replica_id < wide % num_replicas",
        "remainder = replica_id <= wide % num_replicas",
    ),
    _m(
        "mean over several axes: the first alone is counted",
        "3:reductions",
        "np.prod([a.shape[i] for i in axes], dtype=np.int64)",
        "np.prod([a.shape[i] for i in axes[:1]], dtype=np.int64)",
    ),
    _m(
        "moments: the means of replicas are not weighted",
        "2:layers",
        "between = counts * (means - mean) ** 2",
        "between = (means - mean) ** 2",
    ),
    _m(
        "metrics: a weight counts as one example",
        "2:metrics",
        "count = array_module(weights).broadcast_to(weights, array.shape).sum()",
        "count = array.size",
    ),
    # Optimizers.
    _m(
        "SGD: the momentum has the wrong sign",
        "2:optimizers",
        "velocity *= number(self.momentum)\n",
        "velocity *= number(-self.momentum)\n",
    ),
    _m(
        "Adam: the bias of the second moment stays",
        "2:optimizer_rules",
        "scratch /= number(self._root(step))\n",
        "",
    ),
    _m(
        "Adam: its two slots are swapped",
        "tests/unit/optimizers/test_optimizer.py",
        "self._first_stage(step, gradient, *slots)\n        gradient *=",
        "self._first_stage(step, gradient, *reversed(slots))\n        gradient *=",
    ),
    _m(
        "AdamW: excluded names decay too",
        "2:optimizer_rules",
        "        if self._is_excluded(step.name):\n            return 1.0",
        "        if not step.name:\n            return 1.0",
    ),
    _m(
        "LAMB: the ratio of norms upside down",
        "2:optimizer_rules",
        "rate *= math.sqrt(norms[0]) / math.sqrt(norms[1])",
        "rate *= math.sqrt(norms[1]) / math.sqrt(norms[0])",
    ),
    _m(
        "accumulation: after a bad batch the sums stay as they are",
        "2:optim_accumulation",
        "            own_total[...], own_count[...] = total, count\n",
        "            own_count[...] = count\n",
    ),
    _m(
        "accumulation: a restored sum is not scaled to the new number of replicas",
        "2:optim_accumulation",
        "slot.component[...] *= now / num_replicas",
        "slot.component[...] *= 1",
    ),
    _m(
        "non-finite gradients: long arrays pass",
        "2:non_finite",
        "elif not is_finite(array.reshape(-1)):",
        "elif not is_finite(array.reshape(-1)[:_SMALL]):",
    ),
    # Data.
    _m(
        "splitting: the last replicas get the rows that are left over",
        "2:data 3:data 3:data_workers tests/conformance",
        "return [low + (replica < more) for replica in range(num_replicas)]",
        "return [low + (num_replicas - replica <= more) for replica in range("
        "num_replicas)]",
    ),
    _m(
        "splitting: the rest of a batch is lost",
        "2:data tests/unit/data/test_sources.py",
        "self._parts.appendleft((batch, stop, length))",
        "pass",
    ),
    # Checkpoints.
    _m(
        "save: the header is renamed before it is on disk",
        "tests/unit/checkpoint/file/test_image.py tests/mpi/test_failing_disk.py",
        "            os.ftruncate(file, plan.size)\n            flush(file)",
        "            os.ftruncate(file, plan.size)",
    ),
    _m(
        "save: the part of a rank is not flushed",
        "tests/unit/checkpoint/file/test_image.py tests/mpi/test_failing_disk.py",
        "                if self.error is None:\n                    flush(self._file)",
        "                if self.error is None:",
    ),
    _m(
        "save: the folder is not flushed after the rename",
        "tests/unit/checkpoint/file/test_image.py tests/mpi/test_failing_disk.py",
        "published = True\n                flush_folder(os.path.dirname(self.path))",
        "published = True",
    ),
    _m(
        "save: short writes lose the rest",
        "tests/unit/checkpoint/file/test_image.py 3:checkpoint_faults",
        "        done += count\n        if count % PAGE_BYTES",
        "        done = data.nbytes\n        if count % PAGE_BYTES",
    ),
    _m(
        "save: the hash of a block stands in its neighbor's place",
        "3:restoring 3:saving tests/unit/checkpoint/file/test_image.py",
        "self.hashes[index] = block_hash(data)",
        "self.hashes[index - 1] = block_hash(data)",
    ),
    _m(
        "restore: the hashes are not those of the commit record",
        "3:checkpoint_input tests/unit/checkpoint/file/test_damage.py",
        "if hasher.digest() != root:",
        "if len(hasher.digest()) != len(root):",
    ),
    _m(
        "restore: the state of another slot of the streams",
        "2:random",
        '"counter": words[3:7]',
        '"counter": words[2:6]',
    ),
    _m(
        "restore: a row that is read alone is its neighbor's",
        "3:checkpoint_memory 3:restoring",
        "place = extent.offset + row * each",
        "place = extent.offset + (row ^ 1) * each",
    ),
    _m(
        "keep: the best is the worst",
        "tests/unit/checkpoint/keep/test_retention.py",
        'sign = 1 if best.mode == "min" else -1',
        'sign = -1 if best.mode == "min" else 1',
    ),
    _m(
        "keep: one less than was asked for",
        "tests/unit/checkpoint/keep/test_retention.py",
        "keep = ordered[-rules.max_to_keep :]",
        "keep = ordered[1 - rules.max_to_keep :] if rules.max_to_keep > 1 else []",
    ),
    # Arrays on GPUs, or on the stand-in without a GPU.
    _m(
        "MPI on GPUs: a rank of an odd number of them gets no sum",
        "tests/gpu/test_ranks_on_gpu.py::test_transport_tests_pass[3-check_ring]",
        "rank = 2 * other + 1 if other < pairs else other + pairs",
        "rank = 2 * other + 1",
    ),
    # Elastic, divergence.
    _m(
        "elastic: newcomers' term of a mean is counted",
        "tests/mpi/test_elastic.py",
        "count = strategy.num_replicas_in_sync - len(newcomers)",
        "count = strategy.num_replicas_in_sync",
    ),
    _m(
        "elastic: the part of a lost rank is not added to a sum",
        "tests/mpi/test_elastic.py",
        "total: Array = call_without_fp_warnings(np.add, own, lost)",
        "total: Array = own",
    ),
    _m(
        "divergence: the least instead of the most",
        "3:divergence",
        "usual = max(counts, key=lambda value: counts[value])",
        "usual = min(counts, key=lambda value: counts[value])",
    ),
    _m(
        "divergence: the sign of the other extreme",
        "3:divergence",
        "extremes = np.concatenate([own, -own])",
        "extremes = np.concatenate([own, own])",
    ),
)
