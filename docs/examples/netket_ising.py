"""The ground state of an Ising chain by NetKet; it does not mention hpcstrat.

python netket_ising.py
mpirun -n 2 hpcstrat jax netket_ising.py
"""

from __future__ import annotations

import jax
import netket as nk

STEPS = 20


def main() -> None:
    """Print the energy of each step, in process 0."""
    graph = nk.graph.Chain(8)
    hilbert = nk.hilbert.Spin(0.5, graph.n_nodes)
    hamiltonian = nk.operator.IsingJax(hilbert, graph=graph, h=1.0)
    state = nk.vqs.MCState(
        nk.sampler.ExactSampler(hilbert),
        nk.models.RBM(alpha=1, param_dtype=float),
        n_samples=512,
        seed=1,
        sampler_seed=2,
    )
    driver = nk.driver.VMC(
        hamiltonian,
        nk.optimizer.Sgd(0.05),
        variational_state=state,
        # The default solver stops at a tolerance of 1e-5.
        preconditioner=nk.optimizer.SR(
            diag_shift=0.01, solver=nk.optimizer.solver.cholesky
        ),
    )
    log = nk.logging.RuntimeLog()
    driver.run(STEPS, out=log, show_progress=False)
    if jax.process_index() == 0:
        for step, energy in enumerate(log.data["Energy"].Mean.real):
            print(f"processes: {jax.process_count()}, step {step}: energy {energy}")


if __name__ == "__main__":
    main()
