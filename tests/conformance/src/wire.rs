//! One gRPC call as grpc-go writes it. HTTP libraries of other languages refuse
//! to send the `:authority` that a Go client makes of a socket's path, which is
//! the very thing that some servers refuse to read, so the frames are made here.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use prost::Message;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The only stream: the first of a client.
const STREAM: u32 = 1;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;

const END_STREAM: u8 = 0x1;
const ACK: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;

/// What grpc-go makes of a socket's path: bytes that no authority may hold are
/// escaped, `@` among those that stay.
pub(crate) fn authority(path: &Path) -> String {
    use std::os::unix::ffi::OsStrExt as _;
    let kept = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:[]@".contains(&byte);
    let escaped =
        |byte: &u8| if kept(*byte) { char::from(*byte).to_string() } else { format!("%{byte:02X}") };
    path.as_os_str().as_bytes().iter().map(escaped).collect()
}

/// Calls `method` on a socket with the given `:authority`.
pub(crate) async fn call<A: Message + Default>(
    socket: &Path,
    authority: &str,
    method: &str,
    message: &impl Message,
    limit: Duration,
) -> Result<A> {
    let message = message.encode_to_vec();
    let answer = tokio::time::timeout(limit, exchange(socket, authority, method, &message));
    let bytes = answer.await.with_context(|| format!("no answer in {} s", limit.as_secs_f32()))??;
    A::decode(bytes.as_slice()).context("the answer is no message of its type")
}

async fn exchange(socket: &Path, authority: &str, method: &str, message: &[u8]) -> Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket).await.context("cannot connect")?;
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("user-agent", "grpc-go/1.80.0"),
        ("te", "trailers"),
    ];
    let block: Vec<u8> = headers.iter().flat_map(|(name, value)| header(name, value)).collect();
    let mut out = PREFACE.to_vec();
    out.extend(frame(SETTINGS, 0, 0, &[])?);
    out.extend(frame(HEADERS, END_HEADERS, STREAM, &block)?);
    out.extend(frame(DATA, END_STREAM, STREAM, &enveloped(message)?)?);
    stream.write_all(&out).await?;
    let mut body = Vec::new();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.context("the server closed the connection")?;
        let [a, b, c, kind, flags, stream_id @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        stream.read_exact(&mut payload).await.context("the server closed the connection")?;
        let ours = u32::from_be_bytes(stream_id) == STREAM;
        match kind {
            SETTINGS if flags & ACK == 0 => stream.write_all(&frame(SETTINGS, ACK, 0, &[])?).await?,
            PING if flags & ACK == 0 => stream.write_all(&frame(PING, ACK, 0, &payload)?).await?,
            DATA if ours => {
                ensure!(flags & PADDED == 0, "the server pads its frames, which this client cannot read");
                body.extend(payload);
            }
            RST_STREAM if ours => bail!("the server reset the stream ({})", code(&payload, 0)),
            GOAWAY => bail!("the server closed the connection ({})", code(&payload, 4)),
            _ => {}
        }
        if ours && flags & END_STREAM != 0 && matches!(kind, DATA | HEADERS) {
            // An error has trailers and no message.
            let (prefix, message) = body.split_at_checked(5).context("an error and no answer")?;
            ensure!(prefix.first() == Some(&0), "the answer is compressed");
            return Ok(message.to_vec());
        }
    }
}

/// An error code of HTTP/2, by name where it is the one that is met.
fn code(payload: &[u8], at: usize) -> String {
    match payload.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes) {
        Some(1) => "PROTOCOL_ERROR".to_owned(),
        Some(number) => format!("HTTP/2 error {number}"),
        None => "no error code".to_owned(),
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Result<Vec<u8>> {
    let length = u32::try_from(payload.len())?;
    ensure!(length < 1 << 14, "{length} bytes are more than a frame holds");
    let mut bytes = length.to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    Ok(bytes)
}

/// A message with gRPC's prefix: not compressed, length.
fn enveloped(message: &[u8]) -> Result<Vec<u8>> {
    let length = u32::try_from(message.len())?.to_be_bytes();
    Ok([&[0], &length[..], message].concat())
}

/// A literal header field that no table remembers (RFC 7541, 6.2.2), not
/// Huffman-coded.
fn header(name: &str, value: &str) -> Vec<u8> {
    [vec![0], string(name), string(value)].concat()
}

fn string(text: &str) -> Vec<u8> {
    // An integer with a prefix of 7 bits (RFC 7541, 5.1).
    let mut bytes = Vec::new();
    match text.len().checked_sub(127) {
        None => bytes.push(text.len()),
        Some(mut rest) => {
            bytes.push(127);
            while rest >= 128 {
                bytes.push(rest % 128 + 128);
                rest /= 128;
            }
            bytes.push(rest);
        }
    }
    let mut bytes: Vec<u8> = bytes.into_iter().filter_map(|byte| u8::try_from(byte).ok()).collect();
    bytes.extend(text.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_authority_is_the_escaped_path() {
        let path = Path::new("/var/lib/kubelet/plugins_registry/gpu.example.com@reg.sock");
        let expected = "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fgpu.example.com@reg.sock";
        assert_eq!(authority(path), expected);
    }

    #[test]
    fn lengths_are_written_as_hpack_wants_them() {
        assert_eq!(string(&"a".repeat(126))[..2], [126, b'a']);
        assert_eq!(string(&"a".repeat(127))[..3], [127, 0, b'a']);
        // The example of RFC 7541, C.1.2 is 1337 with a prefix of 5 bits; with 7: 1337 - 127 = 1210.
        assert_eq!(string(&"a".repeat(1337))[..4], [127, 0xba, 0x09, b'a']);
    }
}
