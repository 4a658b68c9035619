/* kernels/cpu/isa/convert.c - runs of elements to and from float32. */
#include "kernels/cpu/isa/tables.h"
#include "kernels/cpu/isa/vec.h"

/* NaN codes of e4m3 (0x7f, 0xff) and the factor that vf_from_e4m3_small leaves out. */
INLINE vf finish_e4m3(vf small, const void *codes)
{
    vb b;
    memcpy(&b, codes, sizeof b);
    vu u = vu_from_u16((vh)vhs_from_i8(b));
    return vf_select((u & 0x7f) == 0x7f, vf_all(NAN), small * 256.0f);
}

INLINE void widen_run(float *dst, const char *src, weft_dtype dtype, int64_t size, int64_t count)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf v = vf_load_as(src + i * size, dtype);
        if (dtype == WEFT_F8E4M3) v = finish_e4m3(v, src + i);
        vf_store(dst + i, v);
    }
    if (i == count) return;
    char part[LANES * 4] = {0};
    memcpy(part, src + i * size, (size_t)((count - i) * size));
    vf v = vf_load_as(part, dtype);
    if (dtype == WEFT_F8E4M3) v = finish_e4m3(v, part);
    memcpy(dst + i, &v, (size_t)(count - i) * 4);
}

void ISA(widen)(float *dst, const void *src, weft_dtype dtype, int64_t count)
{
    switch (dtype) {
    case WEFT_F32:
        if (count > 0) memcpy(dst, src, (size_t)count * 4);
        break;
    case WEFT_BF16: widen_run(dst, src, WEFT_BF16, 2, count); break;
    case WEFT_F16: widen_run(dst, src, WEFT_F16, 2, count); break;
    case WEFT_F8E4M3: widen_run(dst, src, WEFT_F8E4M3, 1, count); break;
    default: break;
    }
}

/* Round to nearest even; NaN keeps its upper bits and becomes quiet. */
INLINE vh to_bf16(vf v)
{
    vu u = (vu)v;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16, quiet = (u >> 16) | 0x40;
    vi nan = v != v;
    return vh_from_u32((vu)(((vi)quiet & nan) | ((vi)rounded & ~nan)));
}

INLINE vh to_f16(vf v)
{
#if defined(WEFT_ISA_avx512)
    return (vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(WEFT_ISA_avx2)
    return (vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
    vh h;
    for (int i = 0; i < LANES; i++) h[i] = weft_f16_from_f32(v[i]);
    return h;
#endif
}

INLINE void narrow_run(char *dst, weft_dtype dtype, const float *src, int64_t count)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf v = vf_load(src + i);
        vh h = dtype == WEFT_BF16 ? to_bf16(v) : to_f16(v);
        memcpy(dst + i * 2, &h, sizeof h);
    }
    if (i == count) return;
    vf v = vf_load_part(src + i, WEFT_F32, count - i);
    vh h = dtype == WEFT_BF16 ? to_bf16(v) : to_f16(v);
    memcpy(dst + i * 2, &h, (size_t)(count - i) * 2);
}

void ISA(narrow)(void *dst, weft_dtype dtype, const float *src, int64_t count)
{
    switch (dtype) {
    case WEFT_F32:
        if (count > 0 && dst != src) memcpy(dst, src, (size_t)count * 4);
        break;
    case WEFT_BF16: narrow_run(dst, WEFT_BF16, src, count); break;
    case WEFT_F16: narrow_run(dst, WEFT_F16, src, count); break;
    case WEFT_F8E4M3:
        for (int64_t i = 0; i < count; i++) ((uint8_t *)dst)[i] = weft_e4m3_from_f32(src[i]);
        break;
    default: break;
    }
}
