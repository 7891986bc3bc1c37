//! Encodes the metrics of a run as scalars in an event file of TensorBoard.
//!
//! The file is a sequence of TFRecords: length, masked CRC-32C of the length, data, masked CRC-32C
//! of the data. Each record is an `Event` message of tensorflow/core/util/event.proto in Protocol
//! Buffers encoding. Each attempt writes a session mark with its first step, so that TensorBoard
//! drops the points of steps that are repeated.
use protocol::event::Event;

/// The version of TensorBoard's event files, which the first record contains. It is the lowest
/// version for which TensorBoard applies session marks.
const FILE_VERSION: &str = "brain.Event:2";

/// Returns the name of the event file of a run that began at `time`, in seconds since 1970.
/// TensorBoard reads files in the order of their names.
pub(super) fn format_file_name(run: &str, time: f64) -> String {
    format!("events.out.tfevents.{:010}.{run}", time as u64)
}

/// Encodes the first record of a TensorBoard event file, which contains the version of the format.
/// `time` is in seconds since 1970.
pub(super) fn encode_file_version(time: f64) -> Vec<u8> {
    encode_tfrecord(&encode_event_message(time, 0, &encode_string_field(3, FILE_VERSION)))
}

/// Encodes an event of the run as a record of a TensorBoard event file. The metrics of a step or
/// evaluation become scalars, and the start of an attempt becomes a session mark. Returns `None`
/// for other events. `time` is in seconds since 1970.
pub(super) fn encode_event_record(event: &Event, time: f64) -> Option<Vec<u8>> {
    let scalars = |step: u64, values: &[(&str, f64)]| {
        let values: Vec<u8> =
            values.iter().flat_map(|(tag, v)| encode_bytes_field(1, &encode_scalar_value(tag, *v))).collect();
        encode_event_message(time, step, &encode_bytes_field(5, &values))
    };
    let message = match *event {
        // The session begins with the step after the one it resumes from.
        Event::Ready { step, .. } => {
            encode_event_message(time, step + 1, &encode_bytes_field(7, &encode_varint_field(1, 1)))
        }
        Event::Step { step, loss, grad_norm, lr, tokens_per_s, exposed_comm_s, .. } => scalars(
            step,
            &[
                ("train/loss", loss),
                ("train/grad_norm", grad_norm),
                ("train/lr", lr),
                ("train/tokens_per_s", tokens_per_s),
                ("train/exposed_comm_s", exposed_comm_s),
            ],
        ),
        Event::Eval { step, loss, perplexity, .. } => {
            scalars(step, &[("eval/loss", loss), ("eval/perplexity", perplexity)])
        }
        _ => return None,
    };
    Some(encode_tfrecord(&message))
}

/// Encodes named values as a record of a TensorBoard event file. `time` is in seconds since 1970.
pub(super) fn encode_scalars_record(values: &[(String, f64)], time: f64, step: u64) -> Vec<u8> {
    let values: Vec<u8> =
        values.iter().flat_map(|(tag, v)| encode_bytes_field(1, &encode_scalar_value(tag, *v))).collect();
    encode_tfrecord(&encode_event_message(time, step, &encode_bytes_field(5, &values)))
}

/// Encodes `data` as a TFRecord, which adds its length and checksums.
fn encode_tfrecord(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &compute_masked_crc(&length).to_le_bytes(), data, &compute_masked_crc(data).to_le_bytes()]
        .concat()
}

/// Encodes a TensorBoard `Event` message in Protocol Buffers format from a time in seconds since
/// 1970, a step and encoded content.
fn encode_event_message(time: f64, step: u64, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![1 << 3 | 1];
    out.extend(time.to_le_bytes());
    out.extend(encode_varint_field(2, step));
    out.extend(payload);
    out
}

/// Encodes one named value as a TensorBoard `Summary.Value` message in Protocol Buffers format.
fn encode_scalar_value(tag: &str, value: f64) -> Vec<u8> {
    let mut out = encode_string_field(1, tag);
    out.push(2 << 3 | 5);
    out.extend((value as f32).to_le_bytes());
    out
}

/// Encodes a string field of a Protocol Buffers message. `field` is the field number, below 16.
fn encode_string_field(field: u8, value: &str) -> Vec<u8> {
    encode_bytes_field(field, value.as_bytes())
}

/// Encodes a length-delimited field of a Protocol Buffers message: a byte string or a nested
/// message. `field` is the field number, below 16.
fn encode_bytes_field(field: u8, value: &[u8]) -> Vec<u8> {
    let mut out = vec![field << 3 | 2];
    out.extend(encode_varint(value.len() as u64));
    out.extend(value);
    out
}

/// Encodes an integer field of a Protocol Buffers message. `field` is the field number, below 16.
fn encode_varint_field(field: u8, value: u64) -> Vec<u8> {
    let mut out = vec![field << 3];
    out.extend(encode_varint(value));
    out
}

/// Encodes an integer as a varint of Protocol Buffers: seven bits per byte, the lowest bits first.
fn encode_varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

/// Computes the masked checksum of TFRecords: the CRC-32C of `data`, rotated right by 15 bits, plus
/// a constant.
fn compute_masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_masked_crc32c() {
        // from the CRC-32C of RFC 3720, B.4
        assert_eq!(compute_masked_crc(&[0; 32]), 0x0fd7_fffa);
        assert_eq!(compute_masked_crc(b"123456789"), 0xc78a_b0e5);
    }

    #[test]
    fn varints_have_seven_bits_per_byte() {
        assert_eq!(encode_varint(0), [0]);
        assert_eq!(encode_varint(300), [0xac, 2]);
        assert_eq!(encode_varint(u64::MAX).len(), 10);
    }

    #[test]
    fn records_have_length_and_checksums() {
        let event = Event::Eval { step: 3, loss: 0.5, perplexity: 2.0, tokens: 1 };
        let data = [encode_file_version(7.5), encode_event_record(&event, 8.0).expect("scalars")].concat();
        let first = u64::from_le_bytes(data[..8].try_into().unwrap()) as usize;
        assert_eq!(&data[12..12 + first][9..], [&[2 << 3, 0, 3 << 3 | 2, 13][..], b"brain.Event:2"].concat());
        let second = &data[16 + first..];
        let length = u64::from_le_bytes(second[..8].try_into().unwrap()) as usize;
        assert_eq!(second.len(), length + 16);
        let scalar = [&b"\n\teval/loss\x15"[..], &0.5f32.to_le_bytes()].concat();
        assert!(second.windows(scalar.len()).any(|w| w == scalar));
        assert_eq!(format_file_name("r", 7.5), "events.out.tfevents.0000000007.r");
        assert_eq!(encode_event_record(&Event::new_notice(None, "x"), 8.0), None);
    }
}
