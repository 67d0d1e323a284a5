"""Registration: what loads, what is refused, and that no plugin can take the library down.

Plugins here are fake installed packages: a module and a ``.dist-info`` in a temporary directory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

import pytest

from kvkernels import registry
from kvkernels.backend import API_VERSION, Backend, BackendStatus
from kvkernels.errors import BackendUnavailable, DeviceLost

GOOD = """
from kvkernels.backend import BackendStatus
from kvkernels.capabilities import Capability, DeviceCaps, Route
from kvkernels.errors import DeviceLost
from kvkernels.op import OpKind

class Dev:
    def __init__(self, caps, table):
        self.caps, self.table = caps, table
    def run(self, entry, op, args):
        return entry
    def synchronize(self):
        pass

class B:
    name = "NAME"
    api_version = 3
    row = {"entry": "NAME/attend_x", "kind": OpKind.ATTEND, "route": Route.NATIVE}
    table = (Capability(**row, requires=()),)
    def probe(self):
        return [DeviceCaps(id=f"NAME:{i}", backend="NAME", name="fake") for i in range(2)]
    def open(self, device_id):
        return Dev(next(c for c in self.probe() if c.id == device_id), self.table)
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(name, source, package=...)`` makes a package with the entry point ``B``."""
    monkeypatch.setattr(registry, "BUILTIN", MappingProxyType({}))
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(name: str, source: str, package: str = "", target: str = "{module}:B") -> None:
        package = package or f"kvk-{name}"
        module = package.replace("-", "_")
        made.append(module)
        (tmp_path / f"{module}.py").write_text(source.replace("NAME", name))
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        points = f"[{registry.GROUP}]\n{name} = {target.format(module=module)}\n"
        (info / "entry_points.txt").write_text(points)

    yield make
    for module in made:
        sys.modules.pop(module, None)


def status(name: str) -> BackendStatus:
    (found,) = [s for s in registry.statuses() if s.name == name]
    return found


def test_a_plugin_is_listed_probed_and_opened(install: Install) -> None:
    install("fake", GOOD)
    assert registry.names() == ("fake",)
    assert "kvk_fake" not in sys.modules  # listing names imports nothing
    assert isinstance(registry.backends()["fake"], Backend)
    assert status("fake").ok
    assert [caps.id for caps in status("fake").devices] == ["fake:0", "fake:1"]
    device = registry.open_device("fake:1")
    assert device.caps.id == "fake:1"
    assert json.dumps(status("fake").to_json())


def test_a_probe_may_answer_with_a_status(install: Install) -> None:
    text = "return BackendStatus('NAME', 'unavailable', 'no driver', 'install it')"
    install("fake", GOOD.replace("return [Dev", f"{text}\n        return [Dev"))
    assert str(status("fake")) == "fake: unavailable: no driver. install it"
    with pytest.raises(BackendUnavailable, match=r"no driver\. install it"):
        registry.open_device("fake:0")


BROKEN = {
    "import error": ("import no_such_module_of_ours\n", "broken", "no_such_module_of_ours"),
    "syntax error": ("def broken(:\n", "broken", "SyntaxError"),
    "exit at import": ("import sys\nsys.exit(3)\n", "broken", "SystemExit: 3"),
    "no attribute": ("A = 1\n", "broken", "AttributeError"),
    "constructor raises": (
        GOOD + "    def __init__(self):\n        raise OSError('no lib')\n",
        "broken",
        "OSError: no lib",
    ),
    "not a backend": ("class B:\n    api_version = 3\n", "broken", "no usable name, table, probe"),
    "probe not callable": (GOOD + "    probe = 3\n", "broken", "no usable probe"),
    "table raises": (
        GOOD + "    @property\n    def table(self):\n        raise OSError('driver')\n",
        "broken",
        "OSError: driver",
    ),
    "table of dicts": (GOOD + "    table = ({},)\n", "broken", "not a tuple of Capability"),
    "table of another": (
        GOOD.replace("NAME/attend_x", "cpu/attend_x"),
        "broken",
        "not fake/...: cpu/attend_x",
    ),
    "other name": (GOOD + "    name = 'cuda'\n", "broken", "calls itself 'cuda'"),
    "no version": ("class B:\n    pass\n", "api_mismatch", "API version None"),
    "newer version": (
        GOOD.replace("api_version = 3", f"api_version = {API_VERSION + 1}"),
        "api_mismatch",
        f"API version {API_VERSION + 1}, this library has {API_VERSION}",
    ),
    "probe raises": (
        GOOD.replace("return [Dev", "raise RuntimeError('driver crash')\n        return [Dev"),
        "broken",
        "probe raised RuntimeError: driver crash",
    ),
    "probe gives None": (GOOD.replace("return [Dev", "return\n        [Dev"), "broken", "probe"),
    "probe gives another's": (
        GOOD.replace('id=f"NAME:{i}", backend="NAME"', 'id="cpu:0", backend="cpu"'),
        "broken",
        "not its device",
    ),
    "probe gives text": (GOOD.replace("return [Dev", "return 'ab'\n        [Dev"), "broken", "'a'"),
    "probe with a wrong state": (
        GOOD.replace("return [Dev", "return BackendStatus('NAME', 'fine')\n        [Dev"),
        "broken",
        "'fine'",
    ),
    "no device": (GOOD.replace("range(2)", "range(0)"), "unavailable", "found no device"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_a_status_and_the_others_keep_working(
    install: Install, case: str
) -> None:
    source, state, text = BROKEN[case]
    install("fake", source)
    install("other", GOOD)
    assert status("fake").state == state
    assert text in status("fake").detail
    assert status("other").ok
    assert "other" in registry.backends()
    assert registry.open_device("other:0").caps.id == "other:0"
    with pytest.raises(BackendUnavailable) as caught:
        registry.open_device("fake:0")
    assert caught.value.status == status("fake")


@pytest.mark.parametrize("target", ["{module}", "{module}:B.C.D", "not a target!", "{module}:"])
def test_an_entry_point_that_cannot_be_followed_is_a_status(install: Install, target: str) -> None:
    install("fake", "class B: pass\n", target=target)
    assert not status("fake").ok


def test_a_name_that_cannot_be_part_of_an_id_is_a_status(install: Install) -> None:
    install("My-GPU", GOOD)
    assert (status("My-GPU").state, registry.backends()) == ("broken", {})


def test_two_plugins_of_one_name_conflict_and_neither_is_used(install: Install) -> None:
    install("fake", GOOD, package="kvk-one")
    install("fake", GOOD, package="kvk-two")
    assert registry.names() == ("fake",)
    found = registry.statuses()
    assert [s.state for s in found] == ["conflict", "conflict"]
    assert all("kvk-one, kvk-two" in s.detail for s in found)
    assert registry.backends() == {}
    with pytest.raises(BackendUnavailable, match="registered 2 times"):
        registry.open_device("fake:0")


def test_a_plugin_cannot_replace_a_builtin(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("real", GOOD)  # serves as the module of the built-in
    builtin = MappingProxyType({"real": "kvk_real:B"})
    monkeypatch.setattr(registry, "BUILTIN", builtin)
    found = [s for s in registry.statuses() if s.name == "real"]
    assert [s.state for s in found] == ["ok", "conflict"]
    assert "'kvk-real' registers the name of a built-in backend" in found[1].detail
    assert list(registry.backends()) == ["real"]
    assert registry.open_device("real:0").caps.id == "real:0"


def test_the_same_package_twice_on_the_path_is_no_conflict(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("fake", GOOD)
    copy = tmp_path / "again" / "kvk_fake-1.0.dist-info"
    copy.mkdir(parents=True)
    for file in (tmp_path / "kvk_fake-1.0.dist-info").iterdir():
        (copy / file.name).write_text(file.read_text())
    monkeypatch.syspath_prepend(str(copy.parent))
    assert status("fake").ok


def test_metadata_that_cannot_be_read_hides_no_other_plugin(
    install: Install, tmp_path: Path
) -> None:
    install("fake", GOOD)
    for number, points in enumerate((b"\xff\xfe\x00", b"[kvkernels.backends]\nno equals sign\n")):
        info = tmp_path / f"bad{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bad{number}\nVersion: 1\n")
        (info / "entry_points.txt").write_bytes(points)
    assert status("fake").ok


def test_a_builtin_that_is_not_in_this_build_is_unavailable(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = MappingProxyType({"gone": "kvkernels.gone.backend:GoneBackend"})
    monkeypatch.setattr(registry, "BUILTIN", gone)
    assert status("gone").state == "unavailable"
    assert "this build has no kvkernels.gone" in status("gone").detail
    needs = MappingProxyType({"gone": "no_such_library_of_ours:B"})
    monkeypatch.setattr(registry, "BUILTIN", needs)
    assert status("gone").state == "unavailable"
    assert "'no_such_library_of_ours'" in status("gone").hint


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("fakee:0", "did you mean 'fake'?"),
        ("cuda:0", "no backend of this name; registered: fake"),
        ("fake", "did you mean 'fake:"),
        ("fake:7", "no device 'fake:7'; found: fake:0, fake:1"),
        ("", "no backend of this name"),
        (None, "no backend of this name"),
    ],
)
def test_open_never_falls_over_to_another_device(install: Install, asked: str, text: str) -> None:
    install("fake", GOOD)
    with pytest.raises(BackendUnavailable) as caught:
        registry.open_device(asked)
    assert text in str(caught.value)


def test_opening_that_fails_is_a_typed_error(install: Install) -> None:
    install("fake", GOOD.replace("return Dev(", "raise OSError('busy')\n        return Dev("))
    with pytest.raises(BackendUnavailable, match="opening fake:0 failed: OSError: busy"):
        registry.open_device("fake:0")
    install("lost", GOOD.replace("return Dev(", "raise DeviceLost('gone')\n        return Dev("))
    with pytest.raises(DeviceLost):
        registry.open_device("lost:0")


def test_a_backend_that_opens_another_device_is_refused(install: Install) -> None:
    install("fake", GOOD.replace("if c.id == device_id", "if c.id == 'NAME:0'"))
    assert registry.open_device("fake:0").caps.id == "fake:0"
    with pytest.raises(BackendUnavailable, match="asked for fake:1, it opened fake:0"):
        registry.open_device("fake:1")
