import subprocess


def shell(command: str) -> str:
    """Runs a shell command and returns its output."""
    done = subprocess.run(
        command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, errors="replace"
    )
    return done.stdout[-4000:] or f"exit code {done.returncode}"
