"""Run by Alembic: migrates the connection that ``migrations.upgrade`` hands over."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    transactional_ddl=True,
    transaction_per_migration=not context.config.attributes["at_once"],
)
with context.begin_transaction():
    context.run_migrations()
