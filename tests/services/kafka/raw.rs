//! A record in the bytes of the protocol, for what no client lets pass.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Stores one record with one header, made so long ago, in partition 0 of a topic that has its leader at this broker.
pub fn produce(broker: &str, topic: &str, header: (&[u8], &[u8]), payload: &[u8], age: Duration) {
    let batch = batch(header, payload, age);
    let mut request = Vec::new();
    // Produce, version 3, correlation 1, client "raw".
    request.extend([0, 0, 0, 3, 0, 0, 0, 1]);
    text(&mut request, b"raw");
    // No transaction, acks of all, 30 s.
    request.extend((-1_i16).to_be_bytes());
    request.extend((-1_i16).to_be_bytes());
    request.extend(30_000_i32.to_be_bytes());
    request.extend(1_i32.to_be_bytes());
    text(&mut request, topic.as_bytes());
    request.extend(1_i32.to_be_bytes());
    request.extend(0_i32.to_be_bytes());
    request.extend((batch.len() as i32).to_be_bytes());
    request.extend(batch);
    let mut stream = TcpStream::connect(broker).unwrap();
    let length = (request.len() as i32).to_be_bytes();
    stream.write_all(&length).unwrap();
    stream.write_all(&request).unwrap();
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut answer = vec![0; i32::from_be_bytes(length) as usize];
    stream.read_exact(&mut answer).unwrap();
    // Correlation, one topic, its name, one partition, its number; then the error.
    let at = 4 + 4 + 2 + topic.len() + 4 + 4;
    assert_eq!(answer[at..at + 2], [0, 0], "refused: {answer:?}");
}

fn text(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as i16).to_be_bytes());
    out.extend(bytes);
}

/// A batch of one record, in the only format that is left.
fn batch((name, value): (&[u8], &[u8]), payload: &[u8], age: Duration) -> Vec<u8> {
    let mut record = vec![0];
    varint(&mut record, 0);
    varint(&mut record, 0);
    // No key.
    varint(&mut record, -1);
    sized(&mut record, payload);
    varint(&mut record, 1);
    sized(&mut record, name);
    sized(&mut record, value);

    let made = (time::OffsetDateTime::now_utc() - age).unix_timestamp() * 1_000;
    let mut covered = Vec::new();
    // Attributes, and the last offset.
    covered.extend([0; 6]);
    covered.extend(made.to_be_bytes());
    covered.extend(made.to_be_bytes());
    // No producer, epoch or sequence.
    covered.extend([0xff; 14]);
    covered.extend(1_i32.to_be_bytes());
    sized(&mut covered, &record);

    let mut batch = vec![0; 8];
    // What follows the length: leader epoch, magic and checksum are nine bytes.
    batch.extend((covered.len() as i32 + 9).to_be_bytes());
    batch.extend((-1_i32).to_be_bytes());
    batch.push(2);
    batch.extend(crc32c(&covered).to_be_bytes());
    batch.extend(covered);
    batch
}

fn sized(out: &mut Vec<u8>, bytes: &[u8]) {
    varint(out, bytes.len() as i64);
    out.extend(bytes);
}

fn varint(out: &mut Vec<u8>, value: i64) {
    let mut left = ((value << 1) ^ (value >> 63)) as u64;
    while left >= 0x80 {
        out.push(left as u8 | 0x80);
        left >>= 7;
    }
    out.push(left as u8);
}

fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
    let fold = |crc: u32, byte: &u8| (0..8).fold(crc ^ u32::from(*byte), step);
    !bytes.iter().fold(!0, fold)
}
