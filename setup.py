"""Build the compiled kernels and a page that messages point to.

Everything else about the package is in setup.cfg. Without a C++ compiler the package installs as pure Python and uses
its numpy kernels, unless the environment variable HOROVOD_QUANT_REQUIRE_NATIVE is 1: then a build that fails is an
error.
"""

import os
import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

SOURCES = "horovod_quant/kernels/"

native = Extension(
    "horovod_quant.kernels._native",
    sources=[SOURCES + "native.cpp"],
    depends=[str(header) for header in sorted(Path(SOURCES).glob("*.h"))],
    # Bit-identical with every compiler: no contraction; -fno-*-math only drops errno and trap handling.
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-g0",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
    ],
    language="c++",
    # Loaded with ctypes, so one library serves every version of Python.
    py_limited_api=True,
    define_macros=[("Py_LIMITED_API", "0x03090000")],
    optional=os.environ.get("HOROVOD_QUANT_REQUIRE_NATIVE") != "1",
)


class BuildWithPage(build_py):
    """Put docs/install.md into the package, for people without a checkout.

    The package has no other pages: links to them become their names, docs/gpu.md.
    """

    def run(self) -> None:
        super().run()
        if not getattr(self, "editable_mode", False):
            page = Path("docs/install.md").read_text(encoding="utf-8")
            page = re.sub(r"\[[^\]]*\]\((?![a-z]+:)([^)]+)\)", r"docs/\1", page)
            Path(self.build_lib, "horovod_quant", "install.md").write_text(page, encoding="utf-8")


setup(
    ext_modules=[native],
    cmdclass={"build_py": BuildWithPage},
    options={"bdist_wheel": {"py_limited_api": "cp39"}},
)
