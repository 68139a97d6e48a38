"""The ground state of an Ising chain by NetKet; it does not mention hpcstrat."""

from __future__ import annotations

import jax
import netket as nk


def main() -> None:
    """Print the numbers of processes and devices, and the energy after some steps."""
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
        preconditioner=nk.optimizer.SR(diag_shift=0.01),
    )
    driver.run(10, out=None, show_progress=False)
    full = nk.vqs.FullSumState(hilbert, state.model, variables=state.variables)
    # All processes compute the energy together.
    energy = float(full.expect(hamiltonian).mean.real)
    if jax.process_index() == 0:
        print(jax.process_count(), len(jax.devices()), energy)


if __name__ == "__main__":
    main()
