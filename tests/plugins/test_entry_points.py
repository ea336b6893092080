"""Packages add components through entry points; those that cannot be used are named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from soframe.registry import Registry
from soframe.solvers import Eigen, Solver

PACKAGE = Path(__file__).with_name("package")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, installed by pip from a copy of its sources."""
    folder = tmp_path_factory.mktemp("plugins")
    sources = shutil.copytree(PACKAGE, folder / "sources")
    target = folder / "site"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *options, "--target", target, sources],
        check=True,
        capture_output=True,
    )
    return target


def install_by_hand(folder: Path, points: str, code: str = "") -> Path:
    """A package that is no more than its entry points and one module."""
    info = folder / "other_extras-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-extras\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(dedent(points))
    (folder / "other_extras.py").write_text(dedent(code))
    return folder


def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (ROOT, *folders)))
    return subprocess.run(
        [sys.executable, "-c", dedent(code)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_installed_components_are_listed_and_used_by_name(installed):
    done = run(
        """
        import copy, torch, soframe
        from soframe.settings import grouped
        names = {
            "method": "half-kfac", "solver": "dense-inverse",
            "strategy": "last-rank", "backend": "quiet",
        }
        for kind, name in names.items():
            assert name in soframe.available(kind), (kind, soframe.available(kind))
        assert "ScaleHelper" in {c.__name__ for c in soframe.available("layer").values()}

        import soframe_extras
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), soframe_extras.Scale(3)).double()
        twin = copy.deepcopy(model)
        x = torch.randn(6, 4, dtype=torch.float64)

        def step(model, **options):
            settings = {"kl_clip": None, "solve_every": 1, **options}
            preconditioner = soframe.Preconditioner(model, **grouped(settings))
            model.zero_grad()
            model(x).square().sum(1).mean().backward()
            preconditioner.step()
            return preconditioner

        mine = step(model, **names)
        assert [block.name for block in mine.blocks] == ["0", "1"], mine.report()
        assert mine.placement.strategy == "last-rank"
        assert "half-kfac / dense-inverse" in str(mine.report())
        step(twin, solver=soframe.solvers.Inverse("full"))
        for one, other in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(one.grad, other.grad / 2, rtol=1e-9, atol=1e-12)

        # A component without options or a repr of its own is the same one after a restart.
        again = soframe.Preconditioner(twin, **grouped({"kl_clip": None, **names}))
        again.load_state_dict(mine.state_dict())
        assert all(block.solved for block in again.blocks)
        print("fine")
        """,
        installed,
    )
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.slow
@pytest.mark.thorough
def test_a_trust_region_takes_an_installed_loss_and_damping_by_name(installed):
    done = run(
        """
        import copy, torch, soframe
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        twin = copy.deepcopy(model.double())
        x, y = torch.randn(6, 4).double(), torch.randn(6, 2).double()

        def trained(model, loss, damping):
            statistics = soframe.Statistics(fisher="type-2")
            own = soframe.TrustRegion(model, loss, damping=damping, statistics=statistics)
            dampings = []
            for _ in range(4):
                own.step(lambda: (model(x) - y).square().sum() / 6)
                dampings.append(own.last["damping"])
            return own, dampings

        mine, dampings = trained(model, "twice-squared", "halving")
        assert dampings == [1.0, 0.5, 0.25, 0.125]
        names = type(mine.preconditioner.loss).__name__, type(mine.damping).__name__
        assert names == ("TwiceSquared", "Halving")
        trained(twin, soframe.losses.SquaredError(2.0), lambda step: 0.5**step)
        for one, other in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        assert "twice-squared" in soframe.available("loss")
        assert "halving" in soframe.available("damping")
        print("fine")
        """,
        installed,
    )
    assert done.stdout == "fine\n", done.stderr


BAD = {
    "clash": (
        "[soframe.solver]\neigen = other_extras:Mine\n",
        "import soframe\nclass Mine(soframe.solvers.Eigen): ...\n",
        "entry point 'eigen' of soframe.solver (other_extras:Mine) cannot be used: solver 'eigen'",
    ),
    "no module": (
        "[soframe.solver]\nmine = no_such_module:Mine\n",
        "",
        "entry point 'mine' of soframe.solver (no_such_module:Mine) cannot be used: No module",
    ),
    "no attribute": (
        "[soframe.solver]\nmine = other_extras:Mine\n",
        "",
        "entry point 'mine' of soframe.solver (other_extras:Mine) cannot be used: module",
    ),
    "broken module": (
        "[soframe.solver]\nmine = other_extras:Mine\n",
        "1 / 0\n",
        "entry point 'mine' of soframe.solver (other_extras:Mine) cannot be used: division by zero",
    ),
    "no class": (
        "[soframe.solver]\nmine = other_extras:mine\n",
        "def mine(): ...\n",
        "cannot be used: it is <function mine",
    ),
    "layer that registers nothing": (
        "[soframe.layer]\nmine = other_extras:Mine\n",
        "import soframe\nclass Mine(soframe.layers.LinearHelper): ...\n",
        "registers itself for no module type: decorate it with @soframe.register('layer', ",
    ),
}


@pytest.fixture
def with_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    def install(points: str, code: str) -> None:
        install_by_hand(tmp_path, points, code)
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("other_extras", None)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_named_every_time(name, with_package):
    points, code, message = BAD[name]
    with_package(points, code)
    solvers, layers = Registry("solver"), Registry("layer", type)
    solvers.register("eigen")(Eigen)
    broken = layers if "soframe.layer" in points else solvers
    for ask in (broken.available, lambda: broken.lookup(str), lambda: broken.get("eigen")):
        with pytest.raises(ValueError, match=re.escape(message)):
            ask()
    (layers if broken is solvers else solvers).available()


def test_a_class_of_the_wrong_kind_is_refused_when_it_is_chosen(with_package):
    with_package("[soframe.solver]\nmine = other_extras:Mine\n", "class Mine: ...\n")
    registry = Registry("solver")
    with pytest.raises(TypeError, match=r"solver 'mine' is registered .*, which is not a Solver"):
        registry.build("mine", Solver)


def test_packages_are_looked_for_once(with_package):
    with_package("[soframe.solver]\nmine = other_extras:Mine\n", "class Mine: ...\n")
    registry = Registry("solver")
    assert list(registry.available()) == ["mine"]
    registry._components.clear()
    assert registry.available() == {}
