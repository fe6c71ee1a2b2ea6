"""Print the lowest versions that pyproject.toml allows, as constraints for pip: `name>=1.2` becomes `name==1.2`."""

import re
import tomllib
from pathlib import Path

OF_DEVELOPERS = ("dev", "test", "docs")

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
of_users = (one for name, extra in extras.items() if name not in OF_DEVELOPERS for one in extra)
for requirement in (*project["dependencies"], *of_users):
    if found := re.match(r"([\w.-]+)>=([\w.]+)", requirement):
        print("==".join(found.groups()))
