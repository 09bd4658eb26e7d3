"""``python -m gateway``: read the settings and serve until told to stop."""

import uvicorn

from gateway import logs
from gateway.app import create_app
from gateway.settings import Settings

GRACE_S = 10


def main() -> None:
    settings = Settings()
    logs.configure()
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=30,
    )


if __name__ == "__main__":
    main()
