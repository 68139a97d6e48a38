# A newer version than Spack's own, which is too old for hpcstrat.

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyOptree(PythonPackage):
    """Optimized PyTree Utilities."""

    homepage = "https://github.com/metaopt/optree"
    pypi = "optree/optree-0.20.0.tar.gz"

    license("Apache-2.0")

    version(
        "0.20.0",
        sha256="c7403eb0f2b2a060a97803a8f52904212df85ed6cff4b0eeed9cc6e38c2cf88d",
    )

    depends_on("c", type="build")
    depends_on("cxx", type="build")

    depends_on("cmake@3.18:", type="build")
    depends_on("python@3.9:", type=("build", "link", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-pybind11@2.12:", type=("build", "link"))
    depends_on("py-typing-extensions@4.14:", type=("build", "run"))
