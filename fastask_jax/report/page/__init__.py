"""The page of a run: curves, accuracies, and every trajectory that was kept, one by one.

`run.py` reads a run directory into what the page shows, `site.py` turns one or two runs into the
files of a page, and those are either written (`write_site`: opens from disk) or served on loopback
(`serve`).  The page itself is `assets/`: HTML, CSS and plain JavaScript without a build step, which
asks no other host for anything.  Left out: changing a run, and watching one (reload the page).
"""

from fastask_jax.report.page.server import serve
from fastask_jax.report.page.site import Site, write_site

__all__ = ["Site", "serve", "write_site"]
