// The type traits of metal_type_traits that kernels use.
#pragma once

namespace metal {

template <class T, T V>
struct integral_constant {
  static constexpr constant T value = V;
  using value_type = T;
  using type = integral_constant<T, V>;
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <bool B>
using bool_constant = integral_constant<bool, B>;

template <class T, class U>
struct is_same : false_type {};
template <class T>
struct is_same<T, T> : true_type {};
template <class T, class U>
constexpr constant bool is_same_v = is_same<T, U>::value;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

#ifndef METAL_SIM_GENERIC  // MLX's headers have their own
template <class...>
using void_t = void;
#endif

template <class... B>
struct disjunction : false_type {};
template <class B, class... R>
struct disjunction<B, R...> : bool_constant<B::value || disjunction<R...>::value> {};
template <class... B>
struct conjunction : true_type {};
template <class B, class... R>
struct conjunction<B, R...> : bool_constant<B::value && conjunction<R...>::value> {};
template <class... B>
using _disjunction = disjunction<B...>;  // the spelling of Metal's own internals, which MLX uses

template <class T>
struct remove_cv {
  using type = T;
};
template <class T>
struct remove_cv<const T> {
  using type = T;
};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;
template <class T>
struct remove_const : remove_cv<T> {};
template <class T>
struct remove_reference {
  using type = T;
};
template <class T>
struct remove_reference<T&> {
  using type = T;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;

template <class T>
struct remove_addrspace {
  using type = T;
};
#define MS_SPACE(space)                     \
  template <class T>                        \
  struct remove_addrspace<space T> {        \
    using type = T;                         \
  };                                        \
  template <class T>                        \
  struct remove_addrspace<const space T> {  \
    using type = const T;                   \
  };
MS_SPACE(device)
MS_SPACE(threadgroup)
MS_SPACE(__private)
MS_SPACE(constant)
#undef MS_SPACE
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
constexpr constant bool is_integral_v = __is_integral(T);
template <class T>
struct is_floating_point : bool_constant<__is_floating_point(T)> {};
template <class T>
constexpr constant bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
struct is_arithmetic : bool_constant<__is_arithmetic(T)> {};
template <class T>
constexpr constant bool is_arithmetic_v = is_arithmetic<T>::value;
template <class T>
constexpr constant bool is_signed_v = __is_signed(T);
template <class T>
constexpr constant bool is_unsigned_v = __is_unsigned(T);
template <class T>
struct is_unsigned : bool_constant<__is_unsigned(T)> {};
template <class T>
struct is_signed : bool_constant<__is_signed(T)> {};
template <class T>
constexpr constant bool is_void_v = is_same_v<T, void>;
template <class From, class To>
struct is_convertible : bool_constant<__is_convertible_to(From, To)> {};
template <class From, class To>
constexpr constant bool is_convertible_v = __is_convertible_to(From, To);

template <class T>
struct is_const : false_type {};
template <class T>
struct is_const<const T> : true_type {};

template <class T>
struct is_enum : bool_constant<__is_enum(T)> {};
template <class T>
constexpr constant bool is_enum_v = __is_enum(T);

}  // namespace metal

// Same bits, another type. Metal's spelling of a bit cast; it has no namespace.
template <class To, class From>
constexpr METAL_FUNC To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the two types differ in size");
  return __builtin_bit_cast(To, value);
}
