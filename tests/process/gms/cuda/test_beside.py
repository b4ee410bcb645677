"""Memory of the host in the pools of a GPU's service: told apart by its tag, and by what it is when it comes back."""

from __future__ import annotations

from tests.support.fakecuda import FakeGpus

from .conftest import Run


def test_a_tag_says_whose_memory_it_is_and_a_chunk_is_known_again(run: Run, gpus: FakeGpus) -> None:
    run(
        """
        from gms.backends.beside import BesideHost
        from gms.backends.host import HostPages

        def backend():
            return BesideHost(CudaBackend(0, chunk_bytes=G))

        first = backend()
        index, pages = first.create("host-index", G), first.create("kv", G)
        assert isinstance(index, HostPages) and not isinstance(pages, HostPages)
        assert (first.granularity, first.chunk_bytes, first.readable) == (G, G, False)
        for made in (index, pages):
            first.populate(made, 0, G)
        with Reservation(G) as place:
            place.map([Chunk(index.fd, G)], writable=True)
            place.write(5, b"kept")
            fds = [first.share(made, writable=True) for made in (index, pages)]
            identities = [first.identify(made) for made in (index, pages)]
            for made in (index, pages):
                first.destroy(made)  # as after the service's end: descriptors are left
            again = backend()
            back = [again.adopt(fd, identity) for fd, identity in zip(fds, identities)]
            assert isinstance(back[0], HostPages) and again.identify(back[0]) == identities[0]
            assert raised(ForeignPagesError, again.adopt, fds[1], identities[0])
            assert os.pread(back[0].fd, 4, 5) == b"kept"
        for made in back:
            again.destroy(made)
        for fd in fds:
            os.close(fd)
        """,
        no_context=1,
    )
    assert gpus.calls().count("cuMemCreate") == 1
