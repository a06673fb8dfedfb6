"""What pyproject.toml cannot say: the files of the C library are compiled side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class build_ext_side_by_side(build_ext):
    def build_extension(self, ext: Extension) -> None:
        compile_files = self.compiler.compile

        def compile_side_by_side(sources: Sequence[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [made for (made,) in pool.map(lambda source: compile_files([source], **options), sources)]

        self.compiler.compile = compile_side_by_side
        super().build_extension(ext)


setup(cmdclass={"build_ext": build_ext_side_by_side})
