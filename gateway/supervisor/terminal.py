"""What `loopline up` shows: one live line per process on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.spinner import Spinner
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from gateway.supervisor.children import Child, State

_STYLES: Mapping[State, str] = {
    State.WAITING: "dim",
    State.STARTING: "yellow",
    State.READY: "green",
    State.RESTARTING: "red",
    State.STOPPING: "yellow",
    State.STOPPED: "dim",
}


class Terminal:
    """Shows children while they start and stop. Use as a context manager around the time in which it should be live."""

    def __init__(self, console: Console, children: Sequence[Child]) -> None:
        self._console = console
        self._children = children
        self._since = {child.spec.name: time.monotonic() for child in children}
        self._live: Live | None = None
        self._spinner = Spinner("dots")

    def show(self) -> None:
        """Begin to show the live table; on something that is not a terminal ``changed`` prints lines instead."""
        if self._console.is_terminal and self._live is None:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=8, transient=True)
            self._live.start()

    def hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def changed(self, child: Child) -> None:
        """Note that a child entered a new state; what went wrong is always printed, the rest where nothing is live."""
        name, now = child.spec.name, time.monotonic()
        elapsed_s = now - self._since[name]
        self._since[name] = now
        style = _STYLES[child.state]
        if child.state is State.RESTARTING:
            self._console.print(f"[{style}]{name} {escape(child.note)}[/] [dim]({child.spec.log})[/]", soft_wrap=True)
        elif not self._console.is_terminal:
            after = f" after {elapsed_s:.1f} s" if child.state in (State.READY, State.STOPPED) else ""
            self._console.print(f"{name}: {child.state}{after}", soft_wrap=True)
        elif child.state is State.READY and child.starts > 1:
            self._console.print(f"[{style}]{name} is back[/]")

    def _table(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for child in self._children:
            style = _STYLES[child.state]
            busy = child.state in (State.STARTING, State.STOPPING, State.RESTARTING)
            mark = self._spinner if busy else Text("●", style=style)
            elapsed_s = now - self._since[child.spec.name]
            table.add_row(
                mark,
                child.spec.name,
                Text(str(child.state), style=style),
                Text(f"{elapsed_s:.0f} s" if busy else "", style="dim"),
            )
        return Padding(table, (0, 1))


def show_failure(console: Console, message: str, log: Path, lines: Sequence[str]) -> None:
    """Print why everything stops, and the last lines of the log that says more."""
    console.print(f"[bold red]{escape(message)}[/]", soft_wrap=True)
    console.print(f"Last lines of {log}:" if lines else f"Its log is empty: {log}", soft_wrap=True)
    for line in lines:
        console.print(Text(f"  {line}", style="dim"), soft_wrap=True)


def show_ready(console: Console, *, url: str, key: str, model: str, log_dir: Path, shared: bool) -> None:
    """Print where the gateway listens, the key, and what to paste into a shell, an OpenAI client and the SDK."""
    console.print(
        f"\n[bold green]Loopline is ready[/] at [bold]{url}[/]  (API page: {url}/training/v1/docs)", soft_wrap=True
    )
    console.print(f"Key: [bold]{key}[/]", soft_wrap=True)
    if shared:
        console.print("[yellow]It listens beyond this machine: put a TLS proxy in front of it.[/]")
    for title, language, text in snippets(url=url, key=key, model=model):
        console.print(f"\n[bold]{title}[/]")
        console.print(_plain_or_coloured(console, text, language), soft_wrap=True)
    console.print(f"\nLogs: {log_dir}/*.log    Stop: Ctrl-C", soft_wrap=True)


def snippets(*, url: str, key: str, model: str) -> Sequence[tuple[str, str, str]]:
    """Return (title, language, text) for three clients; each text works as it stands."""
    shell = (
        f"curl -s {url}/training/v1/sessions -H 'Authorization: Bearer {key}' \\\n"
        f"  -H 'Content-Type: application/json' -d '{{\"base_model\": \"{model}\"}}'"
    )
    openai = (
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{url}/v1", api_key="{key}")\n'
        f'turn = {{"role": "user", "content": "Say hello."}}\n'
        f'print(client.chat.completions.create(model="{model}", messages=[turn]).choices[0].message.content)'
    )
    sdk = (
        "import loopline\n"
        f'service = loopline.ServiceClient(base_url="{url}", api_key="{key}")\n'
        f'training = service.create_lora_training_client(base_model="{model}", rank=8)'
    )
    return [("curl", "bash", shell), ("openai", "python", openai), ("loopline", "python", sdk)]


def _plain_or_coloured(console: Console, text: str, language: str) -> RenderableType:
    if not console.is_terminal:
        return Text(text)
    return Group(Syntax(text, language, background_color="default", word_wrap=True))
