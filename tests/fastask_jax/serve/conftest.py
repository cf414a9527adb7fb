"""The workbook and the policies of `fastask ask`'s tests, for servers."""

from tests.fastask_jax.ask.conftest import asked, book, small, taught  # noqa: F401
