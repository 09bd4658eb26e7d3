"""The stores of one transaction."""

from collections.abc import Callable

from gateway.core.limits import Limits
from gateway.core.ports import Ledger
from gateway.store.audit import SqlAuditStore
from gateway.store.blobs import SqlBlobStore
from gateway.store.clients import SqlClientStore
from gateway.store.collection import SqlCollectionStore
from gateway.store.keys import SqlKeyStore
from gateway.store.limits import SqlLimitStore
from gateway.store.locks import SqlLockStore
from gateway.store.operations import SqlOperationStore
from gateway.store.registry import SqlRegistry
from gateway.store.samples import SqlSampleStore
from gateway.store.score_work import SqlScoreWorkStore
from gateway.store.scores import SqlScoreStore
from gateway.store.sessions import SqlSessionStore
from gateway.store.transaction import Transaction
from gateway.store.upkeep import SqlUpkeep
from gateway.store.usage import SqlUsageStore
from gateway.store.versions import SqlVersionStore
from gateway.store.work import SqlWorkStore

LedgerFactory = Callable[[Transaction], Ledger]


class SqlUnit:
    """UnitOfWork on one transaction. Most units use one or two of its stores: each is made when asked for."""

    def __init__(self, transaction: Transaction, ledger: LedgerFactory, limits: Limits) -> None:
        self._transaction = transaction
        self._open_ledger = ledger
        self._ledger: Ledger | None = None
        self._limits = limits

    @property
    def blobs(self) -> SqlBlobStore:
        return SqlBlobStore(self._transaction)

    @property
    def limits(self) -> SqlLimitStore:
        return SqlLimitStore(self._transaction, self._limits)

    @property
    def sessions(self) -> SqlSessionStore:
        return SqlSessionStore(self._transaction, self.limits)

    @property
    def operations(self) -> SqlOperationStore:
        return SqlOperationStore(self._transaction)

    @property
    def versions(self) -> SqlVersionStore:
        return SqlVersionStore(self._transaction)

    @property
    def registry(self) -> SqlRegistry:
        return SqlRegistry(self._transaction)

    @property
    def upkeep(self) -> SqlUpkeep:
        return SqlUpkeep(self._transaction)

    @property
    def keys(self) -> SqlKeyStore:
        return SqlKeyStore(self._transaction)

    @property
    def samples(self) -> SqlSampleStore:
        return SqlSampleStore(self._transaction)

    @property
    def clients(self) -> SqlClientStore:
        return SqlClientStore(self._transaction)

    @property
    def usage(self) -> SqlUsageStore:
        return SqlUsageStore(self._transaction)

    @property
    def work(self) -> SqlWorkStore:
        return SqlWorkStore(self._transaction)

    @property
    def scores(self) -> SqlScoreStore:
        return SqlScoreStore(self._transaction)

    @property
    def score_work(self) -> SqlScoreWorkStore:
        return SqlScoreWorkStore(self._transaction)

    @property
    def locks(self) -> SqlLockStore:
        return SqlLockStore(self._transaction)

    @property
    def collection(self) -> SqlCollectionStore:
        return SqlCollectionStore(self._transaction)

    @property
    def audit(self) -> SqlAuditStore:
        return SqlAuditStore(self._transaction)

    @property
    def ledger(self) -> Ledger:
        self._ledger = self._ledger or self._open_ledger(self._transaction)  # it remembers its notices
        return self._ledger
