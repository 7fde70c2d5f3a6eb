"""The configuration: typed sections that refuse unknown keys, one YAML file, `key=value` overrides.

The defaults are the DAPO paper's (arXiv 2503.14476, Section 4.1), so a recipe states only where it departs
from it.
"""

from dapo_runner.config.commands import *
from dapo_runner.config.data import *
from dapo_runner.config.reading import *
from dapo_runner.config.reward import *
from dapo_runner.config.rollout import *
from dapo_runner.config.run import *
from dapo_runner.config.section import *
from dapo_runner.config.settings import *
from dapo_runner.config.training import *
from dapo_runner.errors import ConfigError as ConfigError
