//! Writes files in the format of `torch.save`, for tests.
use crate::formats::zip;

/// A value of a torch file.
pub(crate) enum TestValue {
    Str(String),
    Int(i64),
    Dict(Vec<(TestValue, TestValue)>),
    List(Vec<TestValue>),
    /// `torch.Size`
    Size(Vec<u64>),
    /// Shape and F32 elements.
    Tensor(Vec<u64>, Vec<f32>),
}

/// A dict with text keys.
pub(crate) fn dict(pairs: Vec<(&str, TestValue)>) -> TestValue {
    TestValue::Dict(pairs.into_iter().map(|(k, v)| (TestValue::Str(k.into()), v)).collect())
}

/// The bytes of a torch file with this value.
pub(crate) fn torch_file(value: &TestValue) -> Vec<u8> {
    let (mut input, mut storages) = (b"\x80\x02".to_vec(), Vec::new());
    write(value, &mut input, &mut storages);
    input.push(b'.');
    let keys: Vec<String> = (0..storages.len()).map(|i| format!("archive/data/{i}")).collect();
    let mut members: Vec<(&str, &[u8])> = vec![("archive/data.pkl", &input), ("archive/version", b"3\n")];
    members.extend(keys.iter().zip(&storages).map(|(k, s): (&String, &Vec<u8>)| (k.as_str(), s.as_slice())));
    zip::pack(&members)
}

fn text(s: &str, out: &mut Vec<u8>) {
    out.push(b'X');
    out.extend((s.len() as u32).to_le_bytes());
    out.extend(s.as_bytes());
}

fn int(n: i64, out: &mut Vec<u8>) {
    out.extend([0x8a, 8]);
    out.extend(n.to_le_bytes());
}

fn ints(values: &[u64], out: &mut Vec<u8>) {
    out.push(b'(');
    values.iter().for_each(|&n| int(n as i64, out));
    out.push(b't');
}

fn write(value: &TestValue, out: &mut Vec<u8>, storages: &mut Vec<Vec<u8>>) {
    match value {
        TestValue::Str(s) => text(s, out),
        TestValue::Int(n) => int(*n, out),
        TestValue::Dict(pairs) => {
            out.extend(b"}(");
            for (key, value) in pairs {
                write(key, out, storages);
                write(value, out, storages);
            }
            out.push(b'u');
        }
        TestValue::List(items) => {
            out.extend(b"](");
            items.iter().for_each(|v| write(v, out, storages));
            out.push(b'e');
        }
        TestValue::Size(sizes) => {
            out.extend(b"ctorch\nSize\n");
            ints(sizes, out);
            out.extend(b"\x85R");
        }
        TestValue::Tensor(shape, values) => {
            out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
            text("storage", out);
            out.extend(b"ctorch\nFloatStorage\n");
            text(&storages.len().to_string(), out);
            text("cpu", out);
            int(values.len() as i64, out);
            out.extend(b"tQ");
            int(0, out);
            ints(shape, out);
            let strides: Vec<u64> = (0..shape.len()).map(|i| shape[i + 1..].iter().product()).collect();
            ints(&strides, out);
            out.extend(b"\x89ccollections\nOrderedDict\n)RtR");
            storages.push(values.iter().flat_map(|v| v.to_le_bytes()).collect());
        }
    }
}
