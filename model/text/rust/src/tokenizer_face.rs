//! What C calls of a tokenizer: made from a file's contents, looked at, asked for ids.

use std::ffi::c_void;

use crate::border::{give, guard, invalid, take_back, Buf, Str};
use crate::tokenizer::{Limits, Tokenizer};
use crate::{gguf, json};

#[repr(C)]
pub struct View {
    vocab_size: i32,
    bos: i32,
    end_of_generation: *const i32,
    n_end_of_generation: usize,
    chat_template: Str,
    bytes: *const u8,
    bytes_offsets: *const u32,
    text: *const u8,
    text_offsets: *const u32,
    flags: *const u8,
    strips_leading_space: u8,
    goes_directly: u8,
}

#[no_mangle]
pub unsafe extern "C" fn kvt_tokenizer_from_json(
    json_text: Str,
    config_json: Str,
    out: *mut *mut Tokenizer,
    error: *mut Buf,
) -> i32 {
    guard(error, || {
        give(out, json::load(json_text.text("tokenizer.json")?, config_json.text("tokenizer_config.json")?)?);
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn kvt_tokenizer_from_gguf(
    vocab: *const gguf::Vocab,
    out: *mut *mut Tokenizer,
    error: *mut Buf,
) -> i32 {
    guard(error, || {
        give(out, gguf::load(&*vocab)?);
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn kvt_tokenizer_free(t: *mut Tokenizer) {
    take_back(t)
}

#[no_mangle]
pub unsafe extern "C" fn kvt_tokenizer_look(t: *const Tokenizer, out: *mut View) {
    let t = &*t;
    out.write(View {
        vocab_size: t.flags.len() as i32,
        bos: t.bos,
        end_of_generation: t.end_of_generation.as_ptr(),
        n_end_of_generation: t.end_of_generation.len(),
        chat_template: Str::of(t.chat_template.as_bytes()),
        bytes: t.bytes.data.as_ptr(),
        bytes_offsets: t.bytes.offsets.as_ptr(),
        text: t.text.data.as_ptr(),
        text_offsets: t.text.offsets.as_ptr(),
        flags: t.flags.as_ptr(),
        strips_leading_space: t.strips_leading_space as u8,
        goes_directly: t.goes_directly() as u8,
    });
}

#[no_mangle]
pub unsafe extern "C" fn kvt_token_id(t: *const Tokenizer, text: Str) -> i32 {
    text.text("token").map_or(-1, |text| (*t).token_id(text))
}

#[no_mangle]
pub unsafe extern "C" fn kvt_tokenizer_json(t: *const Tokenizer, out: *mut Buf) -> i32 {
    guard(out, || {
        out.write(Buf::of((*t).to_json()?.into_bytes()));
        Ok(())
    })
}

#[repr(C)]
pub struct EncodeLimits {
    piece: usize,
    most: usize,
    stopped: Option<unsafe extern "C" fn(*mut c_void) -> u8>,
    stopped_of: *mut c_void,
    by_library: u8,
}

#[no_mangle]
pub unsafe extern "C" fn kvt_encode(
    t: *const Tokenizer,
    text: Str,
    add_bos: u8,
    parse_special: u8,
    limits: *const EncodeLimits,
    out: *mut Buf,
) -> i32 {
    let limits = &*limits;
    guard(out, || {
        if text.bytes().len() > 1 << 30 {
            return Err(invalid(format!("the text has {} bytes; at most 1073741824", text.bytes().len())));
        }
        let stopped = || limits.stopped.is_some_and(|ask| ask(limits.stopped_of) != 0);
        let limits = Limits { piece: limits.piece.max(1), most: limits.most, stopped: &stopped, by_library: limits.by_library != 0 };
        let ids = (*t).encode(text.text("the text")?, add_bos != 0, parse_special != 0, &limits)?;
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for id in ids {
            bytes.extend_from_slice(&id.to_ne_bytes());
        }
        out.write(Buf::of(bytes));
        Ok(())
    })
}
