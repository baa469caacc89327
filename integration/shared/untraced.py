"""Scripts without their line for the trace: nothing of resumekit is left in them."""

from __future__ import annotations

import ast
from pathlib import Path


class _WithoutTrace(ast.NodeTransformer):
    def visit_Import(self, node: ast.Import) -> ast.Import | None:
        return None if node.names[0].name == "resumekit" else node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | ast.Pass:
        is_trace = ast.unparse(node).startswith("resumekit.trace(")
        return ast.Pass() if is_trace else node


def untraced(script: Path, directory: Path) -> Path:
    """A copy of a script in a directory, without resumekit.

    Args:
        script: calls ``resumekit.trace``, and uses nothing else of it.
        directory: where the copy goes.
    """
    source = ast.unparse(
        ast.fix_missing_locations(_WithoutTrace().visit(ast.parse(script.read_text())))
    )
    # Its docstring may speak of resumekit.
    assert "import resumekit" not in source
    assert "resumekit.trace(\n" not in source
    copy = directory / script.name
    copy.write_text(source)
    return copy
