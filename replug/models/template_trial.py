"""Try a chat template in a process with limits of time and memory, before it is used in this one.

Templates come with models, and a few words of one can loop for ever or ask for gigabytes. Other mistakes show
where the tokenizer uses the template.
"""

import json
import subprocess
import sys
from functools import lru_cache

from jinja2 import TemplateError

from replug.cluster.environment import limit_process

SECONDS, MAX_MEMORY_BYTES = 5, 1 << 30  # of the processor, and of addresses
TOO_MUCH = 3  # the status of a process without memory or stack
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@lru_cache(8)
def require_bounded(template: str) -> None:
    """Raise TemplateError for a template that takes too long, or too much memory, for two messages of a letter."""
    command = [sys.executable, "-P", "-m", "replug.models.template_trial", str(SECONDS)]
    done = subprocess.run(command, input=json.dumps(template), text=True, capture_output=True, check=False)
    if done.returncode:
        raise TemplateError(
            f"it takes more than {SECONDS} s or {MAX_MEMORY_BYTES >> 30} GiB for a message of one letter, or calls "
            "itself without end"
        )


def main() -> None:
    """Write two messages by the template on standard input; a template beyond a limit ends the process."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = json.load(sys.stdin)
    limit_process(MAX_MEMORY_BYTES, int(sys.argv[1]))
    try:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        given = {"bos_token": "", "eos_token": "", "raise_exception": str, "strftime_now": str}
        environment.from_string(template).render(messages=MESSAGES, add_generation_prompt=False, **given)
    except (MemoryError, RecursionError):
        sys.exit(TOO_MUCH)
    except Exception:  # noqa: BLE001 - of this process's poorer surroundings, or found again where it is used
        return


if __name__ == "__main__":
    main()
