"""The shell part of ``./kvk`` and ``./test``, with a Python and an apt-get that only pretend."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Answers like CPython 3.11, makes "environments" whose pip writes down what it was asked for.
PYTHON = """#!/bin/sh
case "$*" in
*"import ensurepip"*) [ -e "$STATE/ensurepip" ] || exit 1 ;;
*version_info\\ \\<*) exit ${TOO_OLD:-0} ;;
*venv*version_info*) echo python3.11-venv ;;
--version) echo Python 3.11.2 ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo venv >>"$STATE/log" ;;
*"pip --version"*) ;;
*"pip install"*)
    echo "install $*" >>"$STATE/log"
    [ ! -e "$STATE/nonet" ] || { echo "no network"; exit 1; }
    printf '#!/bin/sh\\necho ran "$@"\\n' >"$VENV/bin/kvk" && chmod +x "$VENV/bin/kvk" ;;
esac
"""
APT = """#!/bin/sh
echo "apt $*" >>"$STATE/log"
[ -e "$STATE/noapt" ] || touch "$STATE/ensurepip"
"""


class Machine:
    """A checkout with only what the scripts need, and a PATH of stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.root, self.state, stubs = folder / "repo", folder / "state", folder / "bin"
        for path in (self.root / "tools", self.state, stubs):
            path.mkdir(parents=True)
        for name in ("kvk", "tools/venv.sh", "pyproject.toml"):
            (self.root / name).write_bytes((ROOT / name).read_bytes())
        (self.root / "kvk").chmod(0o755)
        self.uid = 0
        names = ("python3.13", "python3.12", "python3.11", "python3")
        for name, text in (*((n, PYTHON) for n in names), ("apt-get", APT)):
            self.stub(stubs / name, text)
        self.stub(stubs / "id", '#!/bin/sh\necho "$KVK_TEST_UID"\n')
        self.env = {
            "PATH": f"{stubs}:/usr/bin:/bin",
            "STATE": str(self.state),
            "VENV": str(self.root / ".venv"),
            "HOME": str(folder),
        }

    @staticmethod
    def stub(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def have(self, *names: str) -> None:
        for name in names:
            (self.state / name).touch()

    def log(self) -> str:
        path = self.state / "log"
        return path.read_text() if path.exists() else ""

    def compiler(self, **env: str) -> subprocess.CompletedProcess[str]:
        """What ``./test`` does about a C compiler, where PATH has nothing but the stand-ins."""
        script = f". {self.root}/tools/venv.sh; kvk_compiler"
        alone = {"PATH": self.env["PATH"].split(":")[0], "KVK_TEST_UID": str(self.uid)}
        return subprocess.run(
            ["/bin/sh", "-euc", script],
            capture_output=True,
            text=True,
            check=False,
            env=self.env | alone | env,
            timeout=30,
        )

    def kvk(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "kvk"), *args],
            capture_output=True,
            text=True,
            check=False,
            env=self.env | {"KVK_TEST_UID": str(self.uid)},
            timeout=30,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_use_installs_and_the_second_does_not(machine: Machine) -> None:
    machine.have("ensurepip")
    first = machine.kvk("probe", "--json")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "ran probe --json\n"
    assert "making .venv with Python 3.11.2" in first.stderr
    second = machine.kvk("demo")
    assert (second.stdout, second.stderr) == ("ran demo\n", "")
    assert machine.log().count("install -m") == 1


def test_a_changed_pyproject_installs_again(machine: Machine) -> None:
    machine.have("ensurepip")
    machine.kvk()
    with (machine.root / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    machine.kvk()
    assert machine.log().count("install -m") == 2
    assert machine.log().count("venv\n") == 1


def test_root_gets_the_missing_package_from_apt(machine: Machine) -> None:
    done = machine.kvk("probe")
    assert done.returncode == 0, done.stderr
    assert "apt install -y -qq python3.11-venv" in machine.log()


def test_others_get_the_exact_line(machine: Machine) -> None:
    machine.uid = 1000
    done = machine.kvk("probe")
    assert done.returncode == 1
    assert "Run: apt-get install python3.11-venv" in done.stderr
    assert "apt" not in machine.log()


def test_apt_that_cannot_help_ends_with_the_line(machine: Machine) -> None:
    machine.have("noapt")
    machine.stub(Path(machine.env["PATH"].split(":")[0]) / "apt-get", "#!/bin/sh\nexit 100\n")
    machine.stub(
        Path(machine.env["PATH"].split(":")[0]) / "python3.13",
        PYTHON.replace('"-m venv "*)', '"-m venv "*) exit 1 ;; never)'),
    )
    done = machine.kvk("probe")
    assert done.returncode == 1
    assert "Run: apt-get install python3.11-venv" in done.stderr


def test_a_failed_installation_shows_what_pip_said_and_is_tried_again(machine: Machine) -> None:
    machine.have("ensurepip", "nonet")
    done = machine.kvk("probe")
    assert done.returncode == 1
    assert "no network" in done.stderr
    (machine.state / "nonet").unlink()
    assert machine.kvk("probe").stdout == "ran probe\n"


def test_an_old_python_is_refused(machine: Machine) -> None:
    machine.env["TOO_OLD"] = "1"
    done = machine.kvk("probe")
    assert done.returncode == 1
    assert "no Python 3.11 or newer found" in done.stderr


APT_LINE = "apt-get install gcc libc6-dev"
APT_WITH_GCC = """#!/bin/sh
echo "apt $*" >>"$STATE/log"
printf '#!/bin/sh\\n' >"${0%/*}/gcc" && /bin/chmod +x "${0%/*}/gcc"
"""


@pytest.fixture
def bare(machine: Machine) -> Machine:
    """A machine whose apt-get has a compiler to give, and which has none."""
    machine.stub(stubs(machine) / "apt-get", APT_WITH_GCC)
    return machine


def stubs(machine: Machine) -> Path:
    return Path(machine.env["PATH"].split(":")[0])


def test_a_compiler_that_works_is_left_alone(bare: Machine) -> None:
    bare.stub(stubs(bare) / "mycc", "#!/bin/sh\n")
    bare.stub(stubs(bare) / "cc", "#!/bin/sh\nexit 1\n")
    done = bare.compiler(CC="mycc")
    assert (done.returncode, done.stderr, bare.log()) == (0, "", "")


def test_root_gets_a_compiler_from_apt(bare: Machine) -> None:
    done = bare.compiler()
    assert done.returncode == 0, done.stderr
    assert bare.log() == "apt install -y -qq gcc libc6-dev\n"


def test_a_compiler_without_headers_is_none(bare: Machine) -> None:
    bare.stub(stubs(bare) / "gcc", "#!/bin/sh\nexit 1\n")
    assert bare.compiler().returncode == 0
    assert "libc6-dev" in bare.log()


def test_others_get_the_exact_line_for_a_compiler(bare: Machine) -> None:
    bare.uid = 1000
    done = bare.compiler()
    assert (done.returncode, bare.log()) == (1, "")
    assert APT_LINE in done.stderr


def test_an_apt_without_a_compiler_ends_with_the_line(bare: Machine) -> None:
    bare.stub(stubs(bare) / "apt-get", "#!/bin/sh\nexit 100\n")
    done = bare.compiler()
    assert done.returncode == 1
    assert APT_LINE in done.stderr


GPU_PACKAGES = "g++ hipcc oclgrind ocl-icd-libopencl1 pocl-opencl-icd"
APT_WITH_GPU_TOOLS = """#!/bin/sh
echo "apt $*" >>"$STATE/log"
for name in g++ hipcc oclgrind; do
    printf '#!/bin/sh\\n' >"${0%/*}/$name" && /bin/chmod +x "${0%/*}/$name"
done
printf '#!/bin/sh\\necho libOpenCL.so.1\\n' >"${0%/*}/ldconfig" && /bin/chmod +x "${0%/*}/ldconfig"
: >"${0%/*}/pocl.icd"
"""


@pytest.fixture
def gpuless(machine: Machine) -> Machine:
    """A machine with an apt-get, and nothing that the tests of GPU code need."""
    place = stubs(machine)
    for name in ("tr", "grep", "ls"):
        machine.stub(place / name, f'#!/bin/sh\nexec /usr/bin/{name} "$@"\n')
    machine.stub(place / "apt-get", APT_WITH_GPU_TOOLS)
    machine.env |= {"OCL_ICD_VENDORS": str(place), "LDCONFIG": str(place / "ldconfig")}
    return machine


def gpu_tools(machine: Machine) -> subprocess.CompletedProcess[str]:
    alone = {"PATH": str(stubs(machine)), "KVK_TEST_UID": str(machine.uid)}
    return subprocess.run(
        ["/bin/sh", "-euc", f". {machine.root}/tools/venv.sh; kvk_gpu_tools"],
        capture_output=True, text=True, check=False, env=machine.env | alone, timeout=30,
    )  # fmt: skip


def test_root_gets_what_gpu_tests_need_once(gpuless: Machine) -> None:
    assert gpu_tools(gpuless).returncode == 0
    line = f"apt install -y -qq --no-install-recommends {GPU_PACKAGES}\n"
    assert gpuless.log() == line
    done = gpu_tools(gpuless)
    assert (done.returncode, done.stderr, gpuless.log()) == (0, "", line)


def test_others_get_the_exact_line_for_gpu_tests(gpuless: Machine) -> None:
    gpuless.uid = 1000
    gpuless.stub(stubs(gpuless) / "hipcc", "#!/bin/sh\n")
    done = gpu_tools(gpuless)
    rest = GPU_PACKAGES.replace("hipcc ", "")
    assert (done.returncode, gpuless.log()) == (1, "")
    assert f"apt-get install --no-install-recommends {rest}\n" in done.stderr


@pytest.mark.parametrize("name", ["kvk", "test", ".ci/run"])
def test_the_scripts_can_be_run(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    assert subprocess.run(["sh", "-n", str(ROOT / name)], check=False).returncode == 0
