"""Downloads from a local server: resumed, verified, refused; and archives, split, damaged or hostile."""

import errno
import hashlib
import io
import os
import re
import resource
import struct
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

import pytest

from parzen.lab.data import archives
from parzen.lab.data import download as fetching
from parzen.lab.data.archives import members, open_member, unpack
from parzen.lab.data.download import DATASETS, Dataset, Published, download, main
from parzen.lab.errors import UserError
from parzen.lab.files import lock

BODY = os.urandom(3 << 20) + b"the end"
SIZE = len(BODY)
SHA = "sha256:" + hashlib.sha256(BODY).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves ``bodies`` by path; ``mood(handler, start)`` may answer in its stead."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies = {"/file": BODY}
        self.asked = []
        self.mood = None
        self.ranges = True
        self.version = '"one"'

    def handle_error(self, request, client_address):
        pass  # a client that leaves early

    def published(self, path="/file", checksum=SHA, size=SIZE):
        return Published(f"http://127.0.0.1:{self.server_address[1]}{path}", checksum, size)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_GET(self):
        server, body = self.server, self.server.bodies.get(self.path)
        server.asked.append(self.headers["Range"])
        start = 0
        if server.ranges and self.headers["Range"] and self.headers["If-Range"] == server.version:
            start = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])
        if server.mood and server.mood(self, start):
            return
        if body is None:
            self.send_error(404)
            return
        self.begin(body, start)
        self.wfile.write(body[start:])

    def begin(self, body, start):
        self.send_response(206 if start else 200)
        self.send_header("ETag", self.server.version)
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetching, "WAITS", (0, 0, 0))
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def left(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- fetching ------------------------------------------------------------------------------------


def test_a_file_arrives_whole_and_leaves_nothing_beside_it(server, tmp_path, capsys):
    download(server.published(), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert left(tmp_path) == ["file"]
    download(server.published(), tmp_path / "file")
    assert server.asked == [None]
    assert "already there" in capsys.readouterr().out


def drop_at(*places):
    """Closes the connection at each of the places in turn."""
    places = list(places)

    def mood(handler, start):
        if not places:
            return False
        place = places.pop(0)
        handler.begin(BODY, start)
        handler.wfile.write(BODY[start:place])
        handler.close_connection = True
        return True

    return mood


def test_a_dropped_connection_is_gone_on_from(server, tmp_path):
    server.mood = drop_at(1 << 20, 2 << 20)
    download(server.published(), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert server.asked == [None, "bytes=1048576-", "bytes=2097152-"]


def test_without_ranges_it_starts_over(server, tmp_path):
    server.ranges = False
    server.mood = drop_at(1 << 20)
    download(server.published(), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY


def test_another_version_is_not_joined_to_the_first(server, tmp_path):
    old = bytes(len(BODY))

    def mood(handler, start):
        if server.version == '"old"':
            handler.begin(old, 0)
            handler.wfile.write(old[: 1 << 20])
            server.version = '"new"'
            return True
        return False

    server.version, server.mood = '"old"', mood
    download(server.published(), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert server.asked == [None, "bytes=1048576-"]


def test_an_answer_for_another_range_is_not_appended(server, tmp_path):
    dropped = drop_at(1 << 20)

    def mood(handler, start):
        if start:
            handler.begin(BODY, start // 2)
            handler.wfile.write(BODY[start // 2 :])
            server.ranges = False
        return start or dropped(handler, start)

    server.mood = mood
    download(server.published(), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert len(server.asked) == 3


def test_a_killed_download_is_gone_on_from_in_the_next_run(server, tmp_path, monkeypatch):
    server.mood = drop_at(1 << 20)

    def killed(seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", killed)
        with pytest.raises(KeyboardInterrupt):
            download(server.published(), tmp_path / "file")
    assert not (tmp_path / "file").exists()
    download(server.published(), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert server.asked == [None, "bytes=1048576-"]
    assert left(tmp_path) == ["file"]


@pytest.mark.parametrize("size", [SIZE, None])
def test_what_was_complete_is_not_fetched_again(server, tmp_path, size):
    (tmp_path / ".file.part").write_bytes(BODY)
    download(server.published(size=size), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert server.asked == []


def test_more_than_the_file_in_the_part_is_fetched_anew(server, tmp_path):
    (tmp_path / ".file.part").write_bytes(BODY + b"more")
    (tmp_path / ".file.version").write_text('"one"')
    server.mood = lambda handler, start: start and (handler.send_error(416), True)[1]
    download(server.published(), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert server.asked == [f"bytes={len(BODY) + 4}-", None]


def test_a_busy_server_is_asked_again_but_not_for_ever(server, tmp_path):
    busy = [503, 429, 500]
    server.mood = lambda handler, start: busy and (handler.send_error(busy.pop()), True)[1]
    download(server.published(), tmp_path / "file")
    assert len(server.asked) == 4
    server.mood = lambda handler, start: (handler.send_error(503), True)[1]
    with pytest.raises(UserError, match=r"127.0.0.1: the server answers 503 .*, 4 times in a row; 0 MiB"):
        download(server.published(), tmp_path / "other")


@pytest.mark.parametrize("size", [SIZE, None])
def test_a_wrong_body_is_removed(server, tmp_path, size):
    server.bodies["/file"] = BODY[:-1] + b"?"
    with pytest.raises(UserError, match=r"/file: its checksum is sha256:\w+ instead of .* removed") as caught:
        download(server.published(size=size), tmp_path / "file")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "file").exists()
    assert not (tmp_path / ".file.part").exists()


def test_a_login_page_is_not_taken_for_the_file(server, tmp_path):
    server.bodies["/file"] = b"<html>Please log in</html>"
    with pytest.raises(UserError, match="the server offers 26 bytes, the published file has 3,145,735"):
        download(server.published(), tmp_path / "file")


def test_an_endless_answer_is_cut(server, tmp_path, monkeypatch):
    def endless(handler, start):
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(bytes(1 << 16))

    server.mood = endless
    monkeypatch.setattr(fetching, "LARGEST", 1 << 20)
    for size in (None, 1 << 18):
        with pytest.raises(UserError, match="more than the published file holds"):
            download(server.published(size=size), tmp_path / "file")
        assert (tmp_path / ".file.part").stat().st_size == 0


def test_404_names_the_address(server, tmp_path):
    with pytest.raises(UserError, match=r"http://127.0.0.1:\d+/gone: the server answers 404 Not Found"):
        download(server.published("/gone"), tmp_path / "gone")
    assert len(server.asked) == 1


def test_offline_is_said_at_once(tmp_path, server):
    server.server_close()
    with pytest.raises(UserError, match=r"cannot reach 127.0.0.1: .*refused; check the connection"):
        download(server.published(), tmp_path / "file")


def test_an_unknown_host_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(UserError, match=r"cannot reach nowhere.invalid: .+; check the connection"):
        download(Published("http://nowhere.invalid/file", SHA, 1), tmp_path / "file")


def test_a_full_disk_keeps_what_has_arrived(server, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*: File too large"):
            download(server.published(), tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / ".file.part").stat().st_size == 1 << 20
    download(server.published(), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert server.asked == [None, "bytes=1048576-"]


def test_a_file_of_that_name_is_not_overwritten(server, tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(UserError, match="is there but is not the published file; move it away"):
        download(server.published(), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert server.asked == []


def test_two_downloads_of_one_file_do_not_mix(server, tmp_path):
    with open(tmp_path / ".file.part", "ab") as other:
        assert lock(other, wait=False)
        with pytest.raises(UserError, match="another process is fetching file"):
            download(server.published(), tmp_path / "file")


def test_a_folder_that_cannot_be_written(server, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match=r"cannot make the folder .*taken"):
        main("tinystories", tmp_path / "taken")
    with pytest.raises(UserError, match=r"cannot write in /proc: "):
        download(server.published(), tmp_path.__class__("/proc/file"))


def test_the_table_is_well_formed():
    for dataset in DATASETS.values():
        for file in dataset.files:
            assert re.fullmatch(r"https://\S+/[0-9a-f]{40}/\S+", file.url)
            assert re.fullmatch(r"sha256:[0-9a-f]{64}|git:[0-9a-f]{40}", file.checksum)
        assert len({file.name for file in dataset.files}) == len(dataset.files)


# ---- archives ------------------------------------------------------------------------------------

py7zr = pytest.importorskip("py7zr")
TEXTS = {
    "traindataset.txt": b"train " * 50_000 + os.urandom(50_000),
    "valdataset.txt": b"valid",
    "empty.txt": b"",
}


TWO = {"a.txt": bytes(range(256)) * 40, "b.txt": os.urandom(500)}


def packed(texts, **options):
    out = io.BytesIO()
    with py7zr.SevenZipFile(out, "w", **options) as archive:
        archive.set_encoded_header_mode(False)
        for name, data in texts.items():
            archive.writestr(data, name)
    return out.getvalue()


def with_header(archive, change):
    """The archive with its header changed, and the checksums that this needs."""
    at, size = struct.unpack("<QQ", archive[12:28])
    old = archive[32 + at : 32 + at + size]
    header = change(old)
    assert header != old
    assert len(header) == len(old)
    start = archive[12:28] + struct.pack("<I", zlib.crc32(header))
    return archive[:8] + struct.pack("<I", zlib.crc32(start)) + start + archive[32 : 32 + at] + header


def renamed(archive, old, new):
    return with_header(
        archive, lambda header: header.replace(old.encode("utf-16-le"), new.encode("utf-16-le"))
    )


def split(folder, data, parts=3, name="a.7z"):
    step = -(-len(data) // parts)
    for part in range(parts):
        (folder / f"{name}.{part + 1:03}").write_bytes(data[part * step : (part + 1) * step])
    return folder / f"{name}.001"


@pytest.fixture
def save(tmp_path):
    def put(data, name="a.7z"):
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return put


def test_a_split_archive_is_unpacked(tmp_path):
    path = split(tmp_path, packed(TEXTS))
    assert members(path) == sorted(TEXTS)
    unpack(path, tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == TEXTS


def test_members_are_read_as_they_are_unpacked(tmp_path):
    path = split(tmp_path, packed(TEXTS))
    for name, text in TEXTS.items():
        with open_member(path, name) as stream:
            assert stream.read() == text
    before = threading.active_count()
    with open_member(path, "traindataset.txt") as stream:
        assert stream.read(10) == b"train trai"
    assert threading.active_count() == before


def test_a_folder_in_an_archive(save, tmp_path):
    unpack(save(packed({"deep/er/a.txt": b"a"})), tmp_path / "out")
    assert (tmp_path / "out/deep/er/a.txt").read_bytes() == b"a"


@pytest.mark.parametrize(
    "name",
    [
        "/a.txt",
        "../abc.txt",
        "a/../../b",
        "a\\..\\b",
        "..",
        "C:a.txt",
        "C:/a.txt",
        "a.txt:b",
        "a//b",
        "./a",
        "a\nb",
    ],
)
def test_no_path_leaves_the_folder(save, tmp_path, name):
    plain = "x" * len(name)
    path = save(renamed(packed({plain: b"evil", "good.txt": b"good"}), plain, name))
    for attempt in (
        lambda: unpack(path, tmp_path / "out"),
        lambda: members(path),
        lambda: open_member(path, name).read(),
    ):
        with pytest.raises(UserError, match=r"is unsafe: .* leads out of its folder|damaged") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert left(tmp_path) == ["a.7z"]


def test_links_are_refused(tmp_path, save):
    (tmp_path / "link").symlink_to("/etc/passwd")
    out = io.BytesIO()
    with py7zr.SevenZipFile(out, "w") as archive:
        archive.write(tmp_path / "link", "link")
        archive.writestr(b"x", "a.txt")
    path = save(out.getvalue())
    with pytest.raises(UserError, match="unsafe: 'link' leads out"):
        unpack(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_link_already_in_the_folder_is_replaced_not_followed(tmp_path, save):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a.txt").symlink_to(tmp_path / "precious")
    unpack(save(packed({"a.txt": b"theirs"})), tmp_path / "out")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "out/a.txt").read_bytes() == b"theirs"


def test_the_same_name_twice_is_refused(save, tmp_path):
    path = save(renamed(packed({"a.txt": b"1", "b.txt": b"2"}), "b.txt", "A.txt"))
    with pytest.raises(UserError, match="two files in it have the same name"):
        unpack(path, tmp_path / "out")


def test_bombs_are_refused_by_size_and_number(save, tmp_path, monkeypatch):
    path = save(packed({"a.txt": bytes(5_000_000), "b.txt": b"b"}))
    assert path.stat().st_size < 5000
    monkeypatch.setattr(archives, "MOST_UNPACKED", 4_000_000)
    with pytest.raises(UserError, match="holds 2 files of 5,000,001 bytes: too many"):
        unpack(path, tmp_path / "out")
    monkeypatch.setattr(archives, "MOST_UNPACKED", 6_000_000)
    monkeypatch.setattr(archives, "MOST_MEMBERS", 1)
    with pytest.raises(UserError, match="holds 2 files"):
        members(path)


@pytest.mark.parametrize("filter_id", ["FILTER_DEFLATE", "FILTER_ZSTD", "FILTER_BROTLI"])
def test_methods_without_a_bound_are_refused(save, filter_id):
    path = save(packed({"a.txt": b"a" * 1000}, filters=[{"id": getattr(py7zr, filter_id), "level": 3}]))
    with pytest.raises(UserError, match="another method than LZMA2"):
        members(path)


def test_a_header_without_a_bound_is_refused_unread(save, monkeypatch):
    out = io.BytesIO()
    with py7zr.SevenZipFile(out, "w") as archive:
        archive.writestr(b"a", "a.txt")
    deflated = with_header(
        out.getvalue(), lambda header: header.replace(b"\x21\x21\x01\x18", b"\x03\x04\x01\x08")
    )
    monkeypatch.setattr(py7zr, "SevenZipFile", None)
    with pytest.raises(UserError, match="another method than LZMA2"):
        members(save(deflated))


def test_an_encrypted_archive_is_refused(save):
    with pytest.raises(UserError, match="encrypted"):
        members(save(packed({"a.txt": b"a"}, password="secret")))


def test_damage_anywhere_is_one_line_and_nothing_half_is_left(tmp_path, save):
    whole = packed(TWO)
    random, refused = Random(0), 0
    for number in range(150):
        broken = bytearray(whole)
        if number % 3:
            broken[random.randrange(len(whole))] ^= 1 << random.randrange(8)
        else:
            del broken[random.randrange(len(whole)) :]
        path, out = save(bytes(broken)), tmp_path / f"out{number}"
        try:
            unpack(path, out)
        except UserError as error:
            refused += "\n" not in str(error)
        for file in out.iterdir() if out.exists() else ():
            assert file.name in ("a.txt", "b.txt")
            assert file.read_bytes() == TWO[file.name]
    assert refused > 140


def test_damage_is_found_while_reading(tmp_path, save):
    whole = bytearray(packed({"a.txt": os.urandom(300_000)}))
    whole[150_000] ^= 1
    with open_member(save(bytes(whole)), "a.txt") as stream:
        stream.read(1000)
        with pytest.raises(UserError, match="is damaged, or a part of it is missing"):
            stream.read()


def test_a_missing_part_is_said(tmp_path):
    path = split(tmp_path, packed(TEXTS))
    with pytest.raises(UserError, match=r"a\.7z\.002 is a later part of a split archive; give a\.7z\.001"):
        members(tmp_path / "a.7z.002")
    (tmp_path / "a.7z.002").unlink()
    with pytest.raises(UserError, match="is damaged, or a part of it is missing"):
        members(path)


@pytest.mark.parametrize("found", [None, "0.22.0", "1.1.2"])
def test_the_extra_is_named(save, monkeypatch, found):
    path = save(packed({"a.txt": b"a"}))

    def version(name):
        if found is None:
            raise archives.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(archives, "version", version)
    for attempt in (lambda: members(path), lambda: main("babistories", path.parent)):
        with pytest.raises(UserError, match=r"to read it, run: pip install -U 'parzen\[7z\]'"):
            attempt()


def test_a_full_disk_while_unpacking(save, tmp_path):
    path = save(packed({"a.txt": bytes(2 << 20)}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(UserError, match=rf"cannot write .*a.txt: {os.strerror(errno.EFBIG)}"):
            unpack(path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert left(tmp_path / "out") == []


# ---- both ----------------------------------------------------------------------------------------


@pytest.fixture
def babistories(server, monkeypatch):
    data, files = packed(TEXTS), []
    step = -(-len(data) // 3)
    for part in range(3):
        body = data[part * step : (part + 1) * step]
        server.bodies[f"/b.7z.{part + 1:03}"] = body
        git = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        files.append(server.published(f"/b.7z.{part + 1:03}", f"git:{git}", None))
    dataset = Dataset(tuple(files), "the licence", ("traindataset.txt", "valdataset.txt"))
    monkeypatch.setitem(DATASETS, "babistories", dataset)


def test_a_split_archive_is_fetched_and_unpacked(server, babistories, tmp_path, capsys):
    assert main("babistories", tmp_path / "new" / "data") == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "new/data").iterdir()} == TEXTS
    assert "the licence" in capsys.readouterr().out
    asked = len(server.asked)
    assert main("babistories", tmp_path / "new" / "data") == 0
    assert len(server.asked) == asked


def test_another_archive_than_the_published_one_is_not_opened(server, babistories, tmp_path):
    body = server.bodies["/b.7z.002"]
    server.bodies["/b.7z.002"] = body[:-1] + bytes([body[-1] ^ 1])
    with pytest.raises(UserError, match=r"b.7z.002: its checksum is git:"):
        main("babistories", tmp_path)
    assert left(tmp_path) == [".b.7z.002.version", "b.7z.001"]


def test_files_without_an_archive_stay(server, monkeypatch, tmp_path):
    monkeypatch.setitem(DATASETS, "tinystories", Dataset((server.published(),), "the licence"))
    assert main("tinystories", tmp_path) == 0
    assert left(tmp_path) == ["file"]
